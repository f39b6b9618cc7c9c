"""From a root file system to a SIF file and back. No Django."""

from __future__ import annotations

from pathlib import Path

from sandboxes.backends.roots.sif import NotSif, root_partition, write_sif
from sandboxes.backends.roots.unsquash import UnpackFailed, unpack
from sandboxes.images.errors import BadSource, BuildFailed
from sandboxes.images.job import Job
from sandboxes.images.unpack import adopt

_SECONDS = 7200.0


async def to_sif(job: Job, directory: Path) -> Path:
    """Pack a root file system. Raises BuildFailed."""
    job.step("packing it into a SIF file", 0.9, 0.95)
    packed, target = job.workspace / "image.squashfs", job.workspace / "image.sif"
    await job.run(["mksquashfs", str(directory), str(packed), "-quiet", "-no-progress", "-noappend"], timeout=_SECONDS)

    def write() -> None:
        write_sif(packed, target)
        target.chmod(0o644)
        packed.unlink()

    await job.in_thread(write)
    return target


async def to_directory(job: Job, sif: Path) -> Path:
    """Unpack a SIF file. Raises BuildFailed."""
    job.step("unpacking the SIF file", 0.9, 0.95)
    target = job.folder("unpacked") / "rootfs"

    def unpack_it() -> None:
        try:
            unpack(sif, root_partition(sif), target, job.owner)
        except NotSif as error:
            raise BadSource(str(error)) from error
        except UnpackFailed as error:
            raise BuildFailed(str(error)) from error
        adopt(target, owner=job.owner, check=job.check)

    await job.in_thread(unpack_it)
    return target
