"""Copies of bind sources that the sandboxes' host user cannot reach, such as packages below root's closed home. No Django."""

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
    if all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents):
        return source
    status = path.stat()
    key = hashlib.sha256(f"{path}\0{status.st_ino}\0{status.st_mtime_ns}".encode()).hexdigest()[:24]
    copy = shared_folder() / key / path.name
    if not copy.exists():
        _copy(path, copy)
    return str(copy)


def shared_folder() -> Path:
    """A folder of ours, on a local disk, into which any user can go by name. Raises SandboxStartFailed."""
    folder = _SHARED / f"prorl-binds-{os.geteuid()}"
    folder.mkdir(mode=0o711, exist_ok=True)
    status = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxStartFailed(f"{folder} is not a private folder of ours; remove it")
    folder.chmod(0o711)  # whatever the umask was
    return folder


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
