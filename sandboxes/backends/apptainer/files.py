"""Files for the host user that sandboxes run as: those that all sandboxes share, and a folder for each. No Django."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from sandboxes.backends.staging import shared_folder
from sandboxes.backends.state import Place, remove_tree

# In a sandbox's folder: for `--overlay`, and what of it is the changed files.
OVERLAY = "overlay"
UPPER = f"{OVERLAY}/upper"

_FOLDERS = ("tmp", "cache", "config", OVERLAY, UPPER, f"{OVERLAY}/work")


def shared_file(name: str, data: bytes) -> Path:
    """A file with these contents that any user can read; made once for each contents. Raises SandboxStartFailed, OSError."""
    path = shared_folder() / f"{hashlib.sha256(data).hexdigest()[:24]}-{name}"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        Path(file.name).replace(path)  # several processes may do this at once
    return path


def work_folder(place: Place, user: int | None) -> Path:
    """Where the launcher of this sandbox keeps its files: below the state directory if its user can go there."""
    return place.directory / "work" if user is None else shared_folder() / place.label


def make_work_folder(place: Place, user: int | None) -> Path:
    folder = work_folder(place, user)
    for path in (folder, *(folder / name for name in _FOLDERS)):
        path.mkdir(mode=0o700)
        if user is not None:
            os.chown(path, user, user)
    return folder


def remove_work_folder(place: Place, user: int | None) -> None:
    remove_tree(work_folder(place, user))
