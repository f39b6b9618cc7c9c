"""A folder for each sandbox where its launcher, and the host user that it runs as, may write. No Django."""

from __future__ import annotations

import os
from pathlib import Path

from sandboxes.backends.staging import shared_folder
from sandboxes.backends.state import Place, remove_tree

_FOLDERS = ("tmp", "cache", "config", "memory", "disk", "image", "layer", "root")


def make_work_folder(place: Place, user: int | None) -> Path:
    folder = _work_folder(place, user)
    for path in (folder, *(folder / name for name in _FOLDERS)):
        path.mkdir(mode=0o700)
        if user is not None:
            os.chown(path, user, user)
    return folder


def remove_work_folder(place: Place, user: int | None) -> None:
    remove_tree(_work_folder(place, user))


def _work_folder(place: Place, user: int | None) -> Path:
    """Below the state directory if the launcher's user can go there."""
    return place.directory / "work" if user is None else shared_folder() / place.label
