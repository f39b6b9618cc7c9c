"""Files where the sandboxes' host user can reach them, such as copies of packages below root's closed home. No Django."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from sandboxes.errors import BackendUnavailable

_SHARED = Path("/var/tmp")  # noqa: S108 - a folder of ours in it, checked to be ours


def reachable(source: str) -> str:
    """`source` where any user can go there by name, else a copy of it, made once for each state of the source.

    Raises BackendUnavailable, OSError.
    """
    path = Path(source)
    if is_reachable(path):
        return source
    status = path.stat()
    key = hashlib.sha256(f"{path}\0{status.st_ino}\0{status.st_mtime_ns}".encode()).hexdigest()[:24]

    def fill(folder: Path) -> None:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, symlinks=True)
        else:
            shutil.copy2(path, folder / path.name)

    return str(make_once(shared_folder() / key, fill) / path.name)


def is_reachable(path: Path) -> bool:
    """Whether any user can go to the directory that `path` is in."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def shared_folder() -> Path:
    """A folder of ours, on a local disk, into which any user can go by name. Raises BackendUnavailable."""
    folder = _SHARED / f"prorl-binds-{os.geteuid()}"
    with _needed(folder):
        folder.mkdir(mode=0o711, exist_ok=True)
        status = folder.lstat()
        if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise BackendUnavailable(f"{folder} is not a private folder of ours; remove it")
        folder.chmod(0o711)  # whatever the umask was
    return folder


def shared_file(name: str, data: bytes) -> Path:
    """A file with these contents that any user can read; made once for each contents. Raises BackendUnavailable."""
    path = shared_folder() / f"{_key(data)}-{name}"
    if not path.exists():
        with _needed(path.parent), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder, name)
            partial.write_bytes(data)
            partial.chmod(0o644)
            partial.replace(path)  # several processes may do this at once
    return path


def make_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """`target`, a directory that any user can enter: complete, or not there, although several processes may make it at once.

    `fill` gets an empty directory beside it. Raises BackendUnavailable.
    """
    if not target.exists():
        with _needed(target.parent):
            partial = Path(tempfile.mkdtemp(dir=target.parent))
            try:
                fill(partial)
                partial.chmod(0o755)
                partial.rename(target)
            except OSError:
                if not target.exists():  # else another process was first
                    raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # unless it has its name: what is left of a full disk fills it more
    return target


@functools.lru_cache(maxsize=4)  # a bundle is asked for at every start
def _key(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


@contextlib.contextmanager
def _needed(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendUnavailable(f"the files that sandboxes share cannot be made in {folder}: {error}") from error
