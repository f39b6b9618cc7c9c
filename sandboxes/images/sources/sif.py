"""An Apptainer image file, taken as it is. No Django."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, cast

from sandboxes.images.errors import BadSource
from sandboxes.images.job import Job, Made
from sandboxes.images.layers import file_identity
from sandboxes.images.states import Format
from sandboxes.images.streams import Watched

from .base import FileSettings, Source, bytes_below

_MAGIC = b"SIF_MAGIC"
_MAGIC_OFFSET = 32  # after the line that runs it as a program


class Sif(Source):
    kind: ClassVar[str] = "sif"
    settings: ClassVar[type[FileSettings]] = FileSettings
    example: ClassVar[Mapping[str, Any]] = {"path": "/data/archives/swe.sif"}

    def identity(self, settings: FileSettings) -> str:
        return file_identity(Path(settings.path))

    def space(self, settings: FileSettings) -> int:
        return 5 * bytes_below(Path(settings.path))  # in case it has to be unpacked

    async def make(self, settings: FileSettings, job: Job) -> Made:
        path, target = Path(settings.path), job.workspace / "image.sif"

        def copy() -> None:
            try:
                with path.open("rb") as source, target.open("wb") as file:
                    beginning = source.read(_MAGIC_OFFSET + len(_MAGIC))
                    if beginning[_MAGIC_OFFSET:] != _MAGIC:
                        raise BadSource(f"{path} is no SIF file")
                    source.seek(0)
                    stream = Watched(source, job.meter(path.stat().st_size))
                    shutil.copyfileobj(cast(IO[bytes], stream), file, 1 << 20)
            except OSError as error:
                raise BadSource(f"{path} cannot be copied: {error.strerror}") from error
            target.chmod(0o644)

        job.step(f"copying {path.name}", 0.0, 1.0)
        await job.in_thread(copy)
        return Made(target, Format.SIF)
