"""Debian and what is like it, put together from packages by mmdebstrap. No Django.

It runs in a user namespace: package scripts are root there and nobody outside.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from sandboxes.backends.staging import is_reachable
from sandboxes.images.errors import BuildFailed
from sandboxes.images.job import Job, Made
from sandboxes.images.states import Format

from .base import Source, SourceSettings

_SECONDS = 3600.0
_APT = Path("/etc/apt")
_MIB = 1 << 20
_CHUNK = 1 << 16
_LOOK_SECONDS = 0.2
_HOPELESS = re.compile(
    r"^E: (Unable to locate package|Package .* has no installation candidate|The repository .* does not have a)"
)
_MILESTONES = (
    "I: running apt-get update",
    "I: downloading packages",
    "I: extracting archives",
    "I: installing essential packages",
    "I: installing remaining packages",
    "I: creating tarball",
)

_Package = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.:~=_-]*$", max_length=100)]
_Component = Annotated[str, Field(pattern=r"^[a-z][a-z-]*$", max_length=40)]


class DebianSettings(SourceSettings):
    suite: str = Field(pattern=r"^[a-z][a-z0-9.-]*$", max_length=40, description="A release, such as bookworm.")
    packages: tuple[_Package, ...] = Field((), max_length=1000, description="Besides those of the variant.")
    variant: Literal["extract", "custom", "essential", "apt", "minbase", "standard"] = Field(
        "minbase", description="How much is in it to begin with, as mmdebstrap calls it."
    )
    components: tuple[_Component, ...] = Field(("main",), min_length=1, max_length=10)
    mirror: str = Field("", pattern=r"^(https?://[^\s\[\]@]+)?$", max_length=300, description="Empty: that of the node.")


class Debian(Source):
    kind: ClassVar[str] = "debian"
    settings: ClassVar[type[DebianSettings]] = DebianSettings
    example: ClassVar[Mapping[str, Any]] = {"suite": "bookworm", "packages": ["python3-venv", "git", "ca-certificates"]}

    def space(self, settings: DebianSettings) -> int:
        return (1024 + 16 * len(settings.packages)) * _MIB

    async def make(self, settings: DebianSettings, job: Job) -> Made:
        program = shutil.which("mmdebstrap")
        if program is None:
            raise BuildFailed("mmdebstrap is missing on this node: install the package mmdebstrap")
        mirror = settings.mirror or mirror_of_host()
        job.step(f"putting together {settings.suite} from {mirror}", 0.0, 1.0)
        root = job.workspace / "rootfs"
        unpacker = job.unpacker(root)
        reading, writing = os.pipe()
        command = [program, "--mode=unshare", "--format=tar", f"--variant={settings.variant}"]
        command += ['--aptopt=Acquire::Retries "3"']
        command += [f"--components={','.join(settings.components)}"]
        command += [f"--include={','.join(settings.packages)}"] if settings.packages else []
        command += [settings.suite, "-", mirror]

        async def write() -> None:
            try:
                await job.run(
                    command,
                    timeout=_SECONDS,
                    stdout=writing,
                    env=_temporary(job),
                    retryable=True,
                    hopeless=_HOPELESS,
                    milestones=_MILESTONES,
                )
            finally:
                os.close(writing)

        with _Pipe(reading, job.check) as archive:
            program_run = asyncio.create_task(write())
            try:
                await job.in_thread(unpacker.extract, archive, what="the archive of mmdebstrap")
                await program_run
            except BuildFailed:
                if program_run.done():
                    program_run.result()  # its own error says why the archive ended early
                raise
            finally:
                program_run.cancel()
                await asyncio.gather(program_run, return_exceptions=True)
        return Made(root, Format.DIRECTORY, labels={"suite": settings.suite})


def mirror_of_host() -> str:
    """The Debian mirror in apt's own sources. Raises BuildFailed."""
    for file in sorted([_APT / "sources.list", *_APT.glob("sources.list.d/*")]):
        try:
            text = file.read_text()
        except OSError:
            continue
        pattern = r"^URIs:\s*(https?://\S+)" if file.suffix == ".sources" else r"^deb\s+(?:\[[^\]]*\]\s*)?(https?://\S+)"
        for address in re.findall(pattern, text, re.MULTILINE):
            if re.search(r"/debian/?$", address):
                return str(address)
    raise BuildFailed("this node's apt has no Debian mirror: name one as `mirror`")


def _temporary(job: Job) -> dict[str, str]:
    """mmdebstrap puts the tree together in a temporary directory, as a user that has to be able to go there."""
    folder = job.workspace / "temporary"
    if not is_reachable(folder):
        return {}  # where it does by itself; the workspace would be removed also when it is killed
    folder.mkdir()
    folder.chmod(0o1777)
    return {"TMPDIR": str(folder)}


class _Pipe:
    """What a program writes; reading it ends when the build is cancelled, whoever still holds the other end."""

    def __init__(self, fd: int, check: Callable[[], None]) -> None:
        self._fd = fd
        self._check = check

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, size: int = -1, /) -> bytes:
        while not select.select([self._fd], [], [], _LOOK_SECONDS)[0]:
            self._check()
        return os.read(self._fd, size if size >= 0 else _CHUNK)
