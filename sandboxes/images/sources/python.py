"""A Python package from its source distribution, ready to be worked on: what tasks of software engineering need. No Django.

    /testbed     the source, a git repository with one commit: no history, no remotes, no reflog
    /opt/venv    what it needs, and the package itself, installed so that changes to /testbed count

The package's own code runs while it is built, so it is built inside a sandbox, from the base image, with the network open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sandboxes.images.errors import BadSource
from sandboxes.images.job import Job, Lines, Made, program_failure
from sandboxes.images.pip_config import FILES as PIP_FILES
from sandboxes.images.pip_config import PipConfig, read_pip_config
from sandboxes.images.states import Format
from sandboxes.protocol import Changes, Limits, NetworkMode, NetworkPolicy, SandboxSpec, Session

from .base import BasedSettings, Source

REPOSITORY = "/testbed"
VENV = "/opt/venv"

_AUTHOR = {"NAME": "Base", "EMAIL": "base@localhost", "DATE": "2000-01-01T00:00:00+0000"}
_WORK = "/opt/build"  # on disk, unlike the home and /tmp
_TMP = f"{_WORK}/temporary"
_RESULT = f"{_WORK}/result.tar"
_SECONDS = 3600.0
_SPACE = 4 << 30
_LIMITS = Limits(memory_mb=8192, processes=1024, disk_mb=16_384, file_size_mb=8192, open_files=8192, flood_mb=1024)
# pip: the index knows the package, but not in this version. An index that is away looks like one that knows nothing.
_HOPELESS = re.compile(r"Could not find a version .*\(from versions: (?!none\))")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_ENV = {
    "TMPDIR": _TMP,
    "TERM": "dumb",
    "PIP_NO_INPUT": "1",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_PROGRESS_BAR": "off",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in _AUTHOR.items()},
}
_CHECK = """missing=
for program in git tar find python3; do command -v $program || missing="$missing $program"; done
[ -z "$missing" ] || { echo "the base lacks$missing"; exit 1; }
python3 -c 'import venv, ensurepip' || { echo "the base lacks the module venv (package python3-venv)"; exit 1; }
git --version; python3 --version"""
_UNPACK = f"""cd {_WORK}
python3 -W ignore -c 'import glob, shutil; shutil.unpack_archive(*glob.glob("sdist/*"), "unpacked")'
[ "$(ls -A unpacked | wc -l)" = 1 ]
mv unpacked/* {REPOSITORY}
find {REPOSITORY} \\( -name .git -o -name .hg -o -name .svn \\) -prune -exec rm -rf {{}} +"""
# What installing leaves in the source. The package's own rules about what to ignore hold as well.
_EXCLUDE = "*.egg-info/\n.eggs/\nbuild/\n__pycache__/\n*.so\n*.pyc\n"
_COMMIT = f"""cd {REPOSITORY}
git init -q .
git symbolic-ref HEAD refs/heads/main
cp {_WORK}/exclude .git/info/exclude
git add -A
git commit -q --no-verify --no-gpg-sign --allow-empty -F {_WORK}/message
rm -rf .git/hooks .git/logs .git/COMMIT_EDITMSG .git/description .git/branches
git status --porcelain
[ -z "$(git status --porcelain)" ]
[ "$(git rev-list --all --count)" = 1 ]"""

_Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][^\n\r\x00]*$", max_length=300)]
_Extra = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]


class PythonSettings(BasedSettings):
    """The base has python3 with its venv module, git and tar."""

    package: str = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=100, description="As on PyPI.")
    version: str = Field(pattern=r"^[0-9][A-Za-z0-9.!+_-]*$", max_length=60)
    extras: tuple[_Extra, ...] = Field((), max_length=50, description="Of the package, such as `test`.")
    requirements: tuple[_Requirement, ...] = Field((), max_length=500, description="Also installed, such as `pytest<9`.")


class Python(Source):
    kind: ClassVar[str] = "python"
    settings: ClassVar[type[PythonSettings]] = PythonSettings
    example: ClassVar[Mapping[str, Any]] = {
        "package": "six",
        "version": "1.16.0",
        "base": "debian-12",
        "requirements": ["pytest<9"],
    }

    def space(self, settings: PythonSettings) -> int:
        return _SPACE

    async def make(self, settings: PythonSettings, job: Job) -> Made:
        assert job.base is not None  # noqa: S101 - it has a base
        if job.base.format is not Format.DIRECTORY:
            raise BadSource(f"the base {settings.base} is kept as a SIF file; a base must be kept as a directory")
        config = await read_pip_config(job)
        spec = SandboxSpec(
            limits=_LIMITS,
            binds=config.binds,
            image=settings.base,
            changes=Changes.DISK,
            network=NetworkPolicy(NetworkMode.FULL),
            dead_man_seconds=60.0,
        )
        job.step(f"starting a sandbox of {settings.base}", 0.0, 0.05)
        archive = job.workspace / "result.tar"
        try:
            await job.backend.start(job.name, spec, job.base.root)
            session = await job.backend.connect(job.name)
            try:
                await _build(_Shell(job, session), settings, config)
                with archive.open("wb") as file:
                    async for piece in session.download(_RESULT):
                        file.write(piece)
            finally:
                await session.close()
        finally:
            await job.backend.stop(job.name)
        return await _assemble(job, archive)


class _Shell:
    """Commands in the sandbox, with their output in the log."""

    def __init__(self, job: Job, session: Session) -> None:
        self.session = session
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


async def _build(shell: _Shell, settings: PythonSettings, config: PipConfig) -> None:
    session = shell.session
    await shell.run(_CHECK)
    await shell.run(f"mkdir -p {_TMP} {PIP_FILES}")
    for path, data in config.files.items():
        await session.write_file(path, data)
    await session.set_env({**_ENV, **config.env})

    shell.step(f"fetching {settings.package} {settings.version}", 0.05, 0.25)
    await shell.run(f"python3 -m venv {VENV}")
    await session.write_file(f"{_WORK}/sdist.txt", f"{settings.package}=={settings.version}\n".encode())
    download = f"{VENV}/bin/pip download --no-deps --no-binary=:all: -d {_WORK}/sdist -r {_WORK}/sdist.txt"
    await shell.run(download, retryable=True)
    await shell.run(_UNPACK)

    shell.step("installing it with what it needs", 0.25, 0.8)
    extras = f"[{','.join(settings.extras)}]" if settings.extras else ""
    requirements = "".join(f"{line}\n" for line in (f"-e {REPOSITORY}{extras}", *settings.requirements))
    await session.write_file(f"{_WORK}/requirements.txt", requirements.encode())
    await shell.run(f"{VENV}/bin/pip install -r {_WORK}/requirements.txt", retryable=True)

    shell.step("making the repository", 0.8, 0.85)
    await session.write_file(f"{_WORK}/exclude", _EXCLUDE.encode())
    await session.write_file(f"{_WORK}/message", f"{settings.package} {settings.version}\n".encode())
    await shell.run(_COMMIT)

    shell.step("collecting the result", 0.85, 0.9)
    await shell.run(f"tar -C / -cf {_RESULT} {REPOSITORY[1:]} {VENV[1:]}")


async def _assemble(job: Job, archive: Path) -> Made:
    """The base with what was built in its copy; nothing else of that copy is taken."""
    assert job.base is not None  # noqa: S101 - checked above
    root = job.workspace / "rootfs"
    job.step("copying the base", 0.9, 0.95)
    await job.run(["cp", "-a", "--reflink=auto", str(job.base.path), str(root)], timeout=_SECONDS)

    def unpack() -> None:
        with archive.open("rb") as file:
            job.unpacker(root).extract(file, what="the result")

    job.step("adding the result", 0.95, 1.0)
    await job.in_thread(unpack)
    archive.unlink()
    env = {**job.base.env, "VIRTUAL_ENV": VENV, "PATH": f"{VENV}/bin:{job.base.env.get('PATH', _PATH)}"}
    return Made(root, Format.DIRECTORY, env, dict(job.base.labels))
