"""A root file system as a tar archive, perhaps compressed (`docker export`, mmdebstrap, debootstrap). No Django."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sandboxes.images.errors import BadSource
from sandboxes.images.job import Job, Made
from sandboxes.images.layers import file_identity
from sandboxes.images.states import Format
from sandboxes.images.streams import Watched, decompressed

from .base import FileSettings, Source, bytes_below


class Tarball(Source):
    kind: ClassVar[str] = "tarball"
    settings: ClassVar[type[FileSettings]] = FileSettings
    example: ClassVar[Mapping[str, Any]] = {"path": "/data/archives/rootfs.tar.zst"}

    def identity(self, settings: FileSettings) -> str:
        return file_identity(Path(settings.path))

    def space(self, settings: FileSettings) -> int:
        return 4 * bytes_below(Path(settings.path))

    async def make(self, settings: FileSettings, job: Job) -> Made:
        path, root = Path(settings.path), job.workspace / "rootfs"
        unpacker = job.unpacker(root)

        def unpack() -> None:
            try:
                with path.open("rb") as raw:
                    stream = decompressed(Watched(raw, job.meter(path.stat().st_size)))
                    unpacker.extract(stream, what=path.name)
            except OSError as error:
                raise BadSource(f"{path} cannot be read: {error.strerror}") from error

        job.step(f"unpacking {path.name}", 0.0, 1.0)
        await job.in_thread(unpack)
        if unpacker.skipped:
            job.say(f"{unpacker.skipped} device nodes and the like were left out")
        return Made(root, Format.DIRECTORY)
