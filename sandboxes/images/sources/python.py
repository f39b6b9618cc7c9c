"""A Python package from its source distribution, ready to be worked on: what tasks of software engineering need. No Django.

    /testbed     the source, a git repository with one commit: no history, no remotes, no reflog
    /opt/venv    what it needs, and the package itself, installed so that changes to /testbed count

The package's own code runs while it is built, so it is built inside a sandbox, from the base image, with the network open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sandboxes.images.job import Job, Made

from .base import BasedSettings, Source
from .inside import WORK, Shell, assemble, building, collect

REPOSITORY = "/testbed"
VENV = "/opt/venv"

_SPACE = 4 << 30
_AUTHOR = {"NAME": "Base", "EMAIL": "base@localhost", "DATE": "2000-01-01T00:00:00+0000"}
_GIT = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in _AUTHOR.items()}
_UNPACK = f"""cd {WORK}
python3 -W ignore -c 'import glob, shutil; shutil.unpack_archive(*glob.glob("sdist/*"), "unpacked")'
[ "$(ls -A unpacked | wc -l)" = 1 ]
mv unpacked/* {REPOSITORY}
find {REPOSITORY} \\( -name .git -o -name .hg -o -name .svn \\) -prune -exec rm -rf {{}} +"""
# What installing leaves in the source. The package's own rules about what to ignore hold as well.
_EXCLUDE = "*.egg-info/\n.eggs/\nbuild/\n__pycache__/\n*.so\n*.pyc\n"
_COMMIT = f"""cd {REPOSITORY}
git init -q .
git symbolic-ref HEAD refs/heads/main
cp {WORK}/exclude .git/info/exclude
git add -A
git commit -q --no-verify --no-gpg-sign --allow-empty -F {WORK}/message
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
        async with building(job, settings.base, needs=("git", "tar", "find"), env=_GIT) as shell:
            await _build(shell, settings)
            await collect(job, shell, REPOSITORY, VENV)
        return await assemble(job, env={"VIRTUAL_ENV": VENV}, first=f"{VENV}/bin")


async def _build(shell: Shell, settings: PythonSettings) -> None:
    session = shell.session
    shell.step(f"fetching {settings.package} {settings.version}", 0.05, 0.25)
    await shell.run(f"python3 -m venv {VENV}")
    await session.write_file(f"{WORK}/sdist.txt", f"{settings.package}=={settings.version}\n".encode())
    download = f"{VENV}/bin/pip download --no-deps --no-binary=:all: -d {WORK}/sdist -r {WORK}/sdist.txt"
    await shell.run(download, retryable=True)
    await shell.run(_UNPACK)

    shell.step("installing it with what it needs", 0.25, 0.8)
    extras = f"[{','.join(settings.extras)}]" if settings.extras else ""
    requirements = "".join(f"{line}\n" for line in (f"-e {REPOSITORY}{extras}", *settings.requirements))
    await session.write_file(f"{WORK}/requirements.txt", requirements.encode())
    await shell.run(f"{VENV}/bin/pip install -r {WORK}/requirements.txt", retryable=True)

    shell.step("making the repository", 0.8, 0.85)
    await session.write_file(f"{WORK}/exclude", _EXCLUDE.encode())
    await session.write_file(f"{WORK}/message", f"{settings.package} {settings.version}\n".encode())
    await shell.run(_COMMIT)
