"""From a root file system to a SIF file and back. No Django."""

from __future__ import annotations

from pathlib import Path

from sandboxes.images.job import Job
from sandboxes.images.unpack import adopt

_SECONDS = 3600.0


async def apptainer_build(job: Job, source: Path, target: Path) -> None:
    """Have Apptainer make the SIF file `target` of a definition or a directory. Raises BuildFailed."""
    raise NotImplementedError


async def to_sif(job: Job, directory: Path) -> Path:
    """Raises BuildFailed."""
    target = job.workspace / "image.sif"
    job.step("packing it into a SIF file", 0.9, 0.98)
    await apptainer_build(job, directory, target)
    return target


async def to_directory(job: Job, sif: Path) -> Path:
    """Raises BuildFailed."""
    target = job.workspace / "rootfs"
    job.step("unpacking the SIF file", 0.9, 0.98)
    await job.in_thread(adopt, target, owner=job.owner, check=job.check)
    return target
