"""Where a server gets the weights of a policy version from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rollouts.llm.capabilities import Feature


class PathSource(BaseModel):
    """A checkpoint in a directory that every server can read, in the format it was started from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["path"]
    path: str = Field(min_length=1, max_length=1000)

    @property
    def needs(self) -> Feature:
        return Feature.RELOAD_WEIGHTS


class LoraSource(BaseModel):
    """A LoRA adapter in a directory that every server can read. From then on the server is asked for it by `name`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["lora"]
    name: str = Field(min_length=1, max_length=200)
    path: str = Field(min_length=1, max_length=1000)

    @property
    def needs(self) -> Feature:
        return Feature.LORA


class ExternalSource(BaseModel):
    """The trainer puts the weights in place itself, once it is told that the servers are ready."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["external"]

    @property
    def needs(self) -> None:
        return None


Source = Annotated[PathSource | LoraSource | ExternalSource, Field(discriminator="kind")]

_SOURCE: TypeAdapter[PathSource | LoraSource | ExternalSource] = TypeAdapter(Source)


def parse_source(value: Any) -> PathSource | LoraSource | ExternalSource:
    """Raises pydantic's ValidationError."""
    return _SOURCE.validate_python(value)
