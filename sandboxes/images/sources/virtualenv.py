"""Python packages from PyPI in a virtual environment of their own, upon another image: for programs such as agents. No Django.

Its programs come last in PATH, and it is not active: an agent brings its own interpreter and leaves the image's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sandboxes.images.job import Job, Made
from sandboxes.images.pip_config import uv_variables

from .base import BasedSettings, Source
from .inside import WORK, assemble, building, collect

_SPACE = 4 << 30
_UV = f"{WORK}/uv"
# One file of byte code for each module: else every sandbox of the image compiles what it imports, which takes seconds.
_ENV = {"UV_NO_CACHE": "1", "UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_COMPILE_BYTECODE": "1"}

_Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][^\n\r\x00]*$", max_length=300)]


class VirtualenvSettings(BasedSettings):
    """The base has python3 with its venv module, and tar."""

    requirements: tuple[_Requirement, ...] = Field(min_length=1, max_length=500, description="Such as `mini-swe-agent==2.4.6`.")
    without: tuple[_Requirement, ...] = Field(
        (), max_length=500, description="Packages that others ask for and that are left out, such as `browser-use`."
    )
    path: str = Field(
        "/opt/agent", pattern=r"^/opt(/[A-Za-z0-9._-]*[A-Za-z0-9][A-Za-z0-9._-]*)+$", max_length=200, description="Below /opt."
    )


class Virtualenv(Source):
    kind: ClassVar[str] = "virtualenv"
    settings: ClassVar[type[VirtualenvSettings]] = VirtualenvSettings
    example: ClassVar[Mapping[str, Any]] = {"base": "debian-13", "requirements": ["mini-swe-agent==2.4.6"]}

    def space(self, settings: VirtualenvSettings) -> int:
        return _SPACE

    async def make(self, settings: VirtualenvSettings, job: Job) -> Made:
        async with building(job, settings.base, needs=("tar",), env=_ENV) as shell:
            shell.step("installing the installer", 0.05, 0.15)
            await shell.session.set_env(uv_variables(shell.pip.env))
            await shell.run(f"python3 -m venv {_UV} && {_UV}/bin/pip install 'uv>=0.10'", retryable=True)
            shell.step("installing the packages", 0.15, 0.85)
            for file, lines in (("requirements", settings.requirements), ("without", settings.without)):
                await shell.session.write_file(f"{WORK}/{file}.txt", "".join(f"{line}\n" for line in lines).encode())
            await shell.run(f"python3 -m venv --without-pip {settings.path}")
            files = f"-r {WORK}/requirements.txt --excludes {WORK}/without.txt"
            await shell.run(f"{_UV}/bin/uv pip install --python {settings.path}/bin/python {files}", retryable=True)
            await collect(job, shell, settings.path)
        return await assemble(job, last=f"{settings.path}/bin")
