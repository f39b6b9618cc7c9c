"""An Apptainer definition, which Apptainer builds. No Django."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from sandboxes.backends.apptainer.program import find_program
from sandboxes.backends.apptainer.spython_calls import Caller, SpythonFailed, build_image
from sandboxes.errors import BackendUnavailable
from sandboxes.images.errors import BuildFailed
from sandboxes.images.job import Job, Made
from sandboxes.images.states import Format

from .base import Source, SourceSettings

_SECONDS = 7200.0
_SPACE = 4 << 30
_ON_HOST = re.compile(r"^\s*%(setup|pre)\b", re.MULTILINE)


class DefinitionSettings(SourceSettings):
    text: str = Field(min_length=1, max_length=100_000, description="The definition itself, beginning with Bootstrap.")

    @field_validator("text")
    @classmethod
    def _runs_nothing_on_the_host(cls, text: str) -> str:
        if found := _ON_HOST.search(text):
            raise ValueError(f"%{found[1]} is not allowed, since it runs on the node, outside of the image; use %post")
        if not re.search(r"^\s*Bootstrap\s*:\s*\S+", text, re.IGNORECASE | re.MULTILINE):
            raise ValueError("there is no line `Bootstrap: …`, which says what it begins with")
        return text


class Definition(Source):
    kind: ClassVar[str] = "definition"
    settings: ClassVar[type[DefinitionSettings]] = DefinitionSettings
    example: ClassVar[Mapping[str, Any]] = {
        "text": "Bootstrap: localimage\nFrom: /data/archives/swe.sif\n\n%post\n    echo hello > /etc/motd\n"
    }

    def space(self, settings: DefinitionSettings) -> int:
        return _SPACE

    async def make(self, settings: DefinitionSettings, job: Job) -> Made:
        try:
            program = find_program(job.apptainer, job.owner)
        except BackendUnavailable as error:
            raise BuildFailed(f"a definition is built by Apptainer, and there is none on this node: {error}") from error
        folder = job.folder("apptainer")
        for name in ("tmp", "cache", "config"):
            job.folder(f"apptainer/{name}")
        definition, target = job.workspace / "image.def", folder / "image.sif"
        definition.write_text(settings.text)
        definition.chmod(0o644)
        job.step("building with Apptainer", 0.0, 1.0)
        caller = Caller(program.path, folder, job.owner)
        try:
            labels = await build_image(caller, str(definition), target, timeout=_SECONDS, on_line=job.say)
        except SpythonFailed as error:
            raise BuildFailed(str(error), retryable=True) from error
        os.chown(target, os.geteuid(), os.getegid())
        target.chmod(0o644)
        return Made(target, Format.SIF, labels=labels)
