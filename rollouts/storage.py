"""Where blobs lie unless `PRORL_BLOB_BACKEND` names another Django storage."""

from __future__ import annotations

import os
from pathlib import Path

from django.core.files.base import File
from django.core.files.storage import FileSystemStorage


class DurableFileStorage(FileSystemStorage):
    """Once `save` has returned, file and directory entry are on the disk, and a row that names them may be committed."""

    def _save(self, name: str, content: File[bytes]) -> str:
        name = super()._save(name, content)  # type: ignore[misc]  # not in the stubs
        path = Path(self.path(name))
        for entry in (path, path.parent, path.parent.parent):
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return name
