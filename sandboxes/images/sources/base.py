"""What every kind of source is. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from sandboxes.images.job import Job, Made

_GIB = 1 << 30


class SourceSettings(BaseModel):
    """The settings of a kind of source. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileSettings(SourceSettings):
    """Of sources that are a file, or a directory, of the nodes that build."""

    path: str = Field(pattern=r"^/[^\x00]*$", max_length=1000, description="Absolute path on the nodes that build.")


class BasedSettings(SourceSettings):
    """Of sources that build upon another image."""

    base: str = Field(min_length=1, max_length=100, description="Name of the image that it builds upon.")


class Source:
    """A kind of source: what an image is made from."""

    kind: ClassVar[str]
    settings: ClassVar[type[SourceSettings]]
    example: ClassVar[Mapping[str, Any]]  # settings as somebody might write them

    def identity(self, settings: Any) -> str:
        """What decides about the result besides the settings and the base, such as the digest of a file. Raises BadSource."""
        return ""

    def space(self, settings: Any) -> int:
        """How many bytes making it takes besides the base, roughly. Raises BadSource."""
        return _GIB

    async def make(self, settings: Any, job: Job) -> Made:
        """Make it in the job's workspace. Raises BuildFailed."""
        raise NotImplementedError


def bytes_below(path: Path) -> int:
    """Of a file, or of all files in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
