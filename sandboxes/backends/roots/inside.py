"""Paths in a root file system as those see them who live in it. No Django.

An image may have symbolic links anywhere, and whoever made it may have meant them for us: bubblewrap makes files and mounts at
the paths that it is given, and would follow a link out of the image into the host. So it only gets paths without any.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from sandboxes.errors import SandboxStartFailed

_MOST_LINKS = 40
_MOST_BYTES = 1024 * 1024


def resolved(root: Path, path: str, within: tuple[str, ...] = ()) -> str:
    """`path`, absolute inside `root`, without symbolic links; it need not exist.

    Below the places `within`, which other things are mounted on, nothing of the image is seen. Raises SandboxStartFailed when
    the way to it is not made of directories.
    """
    done, ahead, links = PurePosixPath("/"), list(PurePosixPath(path).parts[1:]), 0
    while ahead:
        name = ahead.pop(0)
        if name == "..":
            done = done.parent
            continue
        here = done / name
        if any(here.is_relative_to(place) for place in within):
            done = here
            continue
        try:
            mode = os.lstat(_outside(root, here)).st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and stat.S_ISLNK(mode):
            links += 1
            if links > _MOST_LINKS:
                raise SandboxStartFailed(f"{root}: {path} is a circle of symbolic links in this image")
            target = PurePosixPath(_outside(root, here).readlink())
            ahead = [*(part for part in target.parts if part != "/"), *ahead]
            done = PurePosixPath("/") if target.is_absolute() else done
        elif mode is not None and ahead and not stat.S_ISDIR(mode):
            raise SandboxStartFailed(f"{root}: {here} is not a directory in this image")
        else:
            done = here
    return str(done)


def text_of(root: Path, path: str) -> str:
    """The contents of a text file in the image; "" when it has no such file."""
    place = _outside(root, PurePosixPath(resolved(root, path)))
    if not place.is_file():
        return ""
    with place.open("rb") as file:
        return file.read(_MOST_BYTES).decode(errors="surrogateescape")


def exists(root: Path, path: str) -> bool:
    return os.path.lexists(_outside(root, PurePosixPath(resolved(root, path))))


def _outside(root: Path, path: PurePosixPath) -> Path:
    return root / path.relative_to("/")
