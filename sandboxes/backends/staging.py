"""Files where the sandboxes' host user can reach them, such as copies of packages below root's closed home. No Django."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from sandboxes.errors import SandboxStartFailed

_SHARED = Path("/var/tmp")  # noqa: S108 - a folder of ours in it, checked to be ours


def reachable(source: str) -> str:
    """`source` where any user can go there by name, else a copy of it, made once for each state of the source."""
    path = Path(source)
    if is_reachable(path):
        return source
    status = path.stat()
    key = hashlib.sha256(f"{path}\0{status.st_ino}\0{status.st_mtime_ns}".encode()).hexdigest()[:24]
    copy = shared_folder() / key / path.name
    if not copy.exists():
        _copy(path, copy)
    return str(copy)


def is_reachable(path: Path) -> bool:
    """Whether any user can go to the directory that `path` is in."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def shared_folder() -> Path:
    """A folder of ours, on a local disk, into which any user can go by name. Raises SandboxStartFailed."""
    folder = _SHARED / f"prorl-binds-{os.geteuid()}"
    folder.mkdir(mode=0o711, exist_ok=True)
    status = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxStartFailed(f"{folder} is not a private folder of ours; remove it")
    folder.chmod(0o711)  # whatever the umask was
    return folder


def shared_file(name: str, data: bytes) -> Path:
    """A file with these contents that any user can read; made once for each contents. Raises SandboxStartFailed, OSError."""
    path = shared_folder() / f"{hashlib.sha256(data).hexdigest()[:24]}-{name}"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        Path(file.name).replace(path)  # several processes may do this at once
    return path


def _copy(source: Path, target: Path) -> None:
    """Complete under its final name or not there: several processes may do this at once."""
    partial = Path(tempfile.mkdtemp(dir=target.parents[1]))
    if source.is_dir():
        shutil.copytree(source, partial / source.name, symlinks=True)
    else:
        shutil.copy2(source, partial / source.name)
    partial.chmod(0o755)
    try:
        partial.rename(target.parent)
    except OSError:  # another process was first
        shutil.rmtree(partial)
        if not target.exists():
            raise
