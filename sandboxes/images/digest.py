"""What identifies the contents of an image. No Django."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sandboxes.images.states import Format

_CHUNK = 1 << 20


class Contents(NamedTuple):
    """`digest` names the contents ("sha256-…"), `size` is in bytes; a file with several names counts once."""

    digest: str
    size: int


def read_contents(path: Path, format: Format, check: Callable[[], None] = lambda: None) -> Contents:
    """Read all of an image. `check` is called often, and may raise to end it. Raises OSError."""
    return _of_file(path, check) if format is Format.SIF else _of_directory(path, check)


def _of_file(path: Path, check: Callable[[], None]) -> Contents:
    return Contents(f"sha256-{_hash_of(path, check).hex()}", path.stat().st_size)


def _of_directory(root: Path, check: Callable[[], None]) -> Contents:
    """Of the paths below `root` in order of their bytes: type, permissions, and contents or the target of a link.

    Not of owners and times, which differ with whoever unpacked it and when.
    """
    total = hashlib.sha256()
    seen: dict[tuple[int, int], bytes] = {}
    size = 0
    pending = [(b"", root)]
    while pending:
        name, path = pending.pop()
        status = path.lstat()
        kind, mode, contents = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), b""
        if kind == stat.S_IFDIR:
            children = [(os.fsencode(child.relative_to(root)), child) for child in path.iterdir()]
            pending += sorted(children, reverse=True)
        elif kind == stat.S_IFLNK:
            mode = 0
            contents = os.fsencode(os.readlink(path))  # noqa: PTH115 - as it is written, which a Path does not keep
        elif kind == stat.S_IFREG:
            check()
            identity = (status.st_dev, status.st_ino)
            if identity not in seen:
                size += status.st_size
            contents = seen.get(identity) or _hash_of(path, check)
            if status.st_nlink > 1:
                seen[identity] = contents
        # Lengths, so that no name can look like two fields.
        for field in (name, b"%o" % kind, b"%o" % mode, contents):
            total.update(b"%d:" % len(field))
            total.update(field)
    return Contents(f"sha256-{total.hexdigest()}", size)


def _hash_of(path: Path, check: Callable[[], None]) -> bytes:
    result = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            check()
            result.update(chunk)
    return result.digest()
