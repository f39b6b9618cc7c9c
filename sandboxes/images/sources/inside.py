"""Building inside a sandbox of the base image, with the network open: for what runs code that nobody has looked at. No Django.

What is built there is packed into one archive inside, and added to a copy of the base; nothing else of the sandbox is taken.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from sandboxes.errors import TeardownFailed
from sandboxes.images.errors import BadSource
from sandboxes.images.job import Job, Lines, Made, program_failure
from sandboxes.images.pip_config import FILES as PIP_FILES
from sandboxes.images.pip_config import PipConfig, read_pip_config
from sandboxes.images.states import Format
from sandboxes.protocol import Changes, Limits, NetworkMode, NetworkPolicy, SandboxSpec, Session

WORK = "/opt/build"  # on disk, unlike the home and /tmp

_TMP = f"{WORK}/temporary"
_RESULT = f"{WORK}/result.tar"
_SECONDS = 3600.0
_PATIENCE = 10
_LIMITS = Limits(memory_mb=8192, processes=1024, disk_mb=16_384, file_size_mb=8192, open_files=8192, flood_mb=1024)
# pip and uv: the index knows the package, but not in this version. An index that is away looks like one that knows nothing.
_HOPELESS = re.compile(r"Could not find a version .*\(from versions: (?!none\))|requirements are unsatisfiable")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_ENV = {
    "TMPDIR": _TMP,
    "TERM": "dumb",
    "PIP_NO_INPUT": "1",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_PROGRESS_BAR": "off",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
_CHECK = """missing=
for program in PROGRAMS python3; do command -v $program || missing="$missing $program"; done
[ -z "$missing" ] || { echo "the base lacks$missing"; exit 1; }
python3 -c 'import venv, ensurepip' || { echo "the base lacks the module venv (package python3-venv)"; exit 1; }
python3 --version"""


class Shell:
    """Commands in the sandbox, with their output in the job's log. `pip` is how this node's pip is configured."""

    def __init__(self, job: Job, session: Session, pip: PipConfig) -> None:
        self.session = session
        self.pip = pip
        self.step = job.step
        self._job = job

    async def run(self, command: str, *, retryable: bool = False) -> None:
        lines = Lines(self._job.say)
        # Into a pipe: at a terminal, programs draw.
        piped = f"( set -e -o pipefail; {{ {command}\n}} </dev/null 2>&1 | cat )"
        result = await self.session.bash(piped, timeout=_SECONDS, on_output=lines.feed)
        lines.end()
        if result.exit_code != 0:
            why = f"failed with status {result.exit_code}"
            if result.timed_out or result.limit_exceeded:
                why = "took too long" if result.timed_out else f"exceeded the limit {result.limit_exceeded}"
            tail = result.output.splitlines()[-12:]
            raise program_failure(f"{self._job.step_text} {why}", tail, retryable=retryable, hopeless=_HOPELESS)


@asynccontextmanager
async def building(job: Job, base: str, *, needs: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Shell]:
    """A sandbox of the job's base, which is called `base`; it ends with the context.

    Raises BadSource for a SIF file, BuildFailed where the base lacks a program of `needs` or python3 with its venv module.
    """
    assert job.base is not None  # noqa: S101 - it has a base
    if job.base.format is not Format.DIRECTORY:
        raise BadSource(f"the base {base} is kept as a SIF file; a base must be kept as a directory")
    pip = await read_pip_config(job)
    spec = SandboxSpec(
        limits=_LIMITS,
        binds=pip.binds,
        image=base,
        changes=Changes.DISK,
        network=NetworkPolicy(NetworkMode.FULL),
        dead_man_seconds=60.0,
    )
    job.step(f"starting a sandbox of {base}", 0.0, 0.05)
    try:
        await job.backend.start(job.name, spec, job.base.root)
        session = await job.backend.connect(job.name)
        try:
            shell = Shell(job, session, pip)
            await shell.run(_CHECK.replace("PROGRAMS", " ".join(needs)))
            await shell.run(f"mkdir -p {_TMP} {PIP_FILES}")
            for path, data in pip.files.items():
                await session.write_file(path, data)
            await session.set_env({**_ENV, **env, **pip.env})
            yield shell
        finally:
            await session.close()
    finally:
        await _stop(job)


async def _stop(job: Job) -> None:
    for _ in range(_PATIENCE):
        try:
            return await job.backend.stop(job.name)
        except TeardownFailed:  # its last process waits for gigabytes to be written to disk
            job.say("the sandbox has not ended yet")
    await job.backend.stop(job.name)


async def collect(job: Job, shell: Shell, *folders: str) -> None:
    """Bring these directories of the sandbox, absolute paths, into the job's workspace."""
    shell.step("collecting the result", 0.85, 0.9)
    await shell.run(f"tar -C / -cf {_RESULT} {' '.join(folder.removeprefix('/') for folder in folders)}")
    with (job.workspace / "result.tar").open("wb") as file:
        async for piece in shell.session.download(_RESULT):
            file.write(piece)
    await shell.run(f"rm -rf {WORK} {' '.join(folders)}")  # else it would all be written to disk at the sandbox's end


async def assemble(job: Job, *, env: Mapping[str, str] | None = None, first: str = "", last: str = "") -> Made:
    """The base with what was collected in its copy, more variables, and more directories in its PATH."""
    assert job.base is not None  # noqa: S101 - as above
    root = job.workspace / "rootfs"
    archive = job.workspace / "result.tar"
    job.step("copying the base", 0.9, 0.95)
    await job.run(["cp", "-a", "--reflink=auto", str(job.base.path), str(root)], timeout=_SECONDS)

    def unpack() -> None:
        with archive.open("rb") as file:
            job.unpacker(root).extract(file, what="the result")

    job.step("adding the result", 0.95, 1.0)
    await job.in_thread(unpack)
    archive.unlink()
    path = ":".join(part for part in (first, job.base.env.get("PATH", _PATH), last) if part)
    return Made(root, Format.DIRECTORY, {**job.base.env, **(env or {}), "PATH": path}, dict(job.base.labels))
