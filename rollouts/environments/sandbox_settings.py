"""The sandbox of an environment, as its configuration says it: the same for all environments that have one. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sandboxes.network.policy import validate_allow
from sandboxes.protocol import Bind, Changes, Limits, NetworkMode, NetworkPolicy, SandboxSpec

_DEFAULTS = Limits()


def _allow_entry(entry: str) -> str:
    validate_allow([entry])
    return entry


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NetworkSettings(_Settings):
    """What the sandbox can reach, see `sandboxes.protocol.NetworkMode`."""

    mode: NetworkMode = Field(
        default=NetworkMode.NONE,
        description="none, allow_list, or full, which needs PRORL_SANDBOX_FULL_NETWORK on the node.",
    )
    allow: tuple[Annotated[str, AfterValidator(_allow_entry)], ...] = Field(
        default=(),
        max_length=100,
        description="For allow_list: 'pypi.org' and '*.example.org' mean ports 80 and 443, 'example.org:8443' that one.",
    )

    @model_validator(mode="after")
    def _list_goes_with_mode(self) -> Self:
        if self.mode is NetworkMode.ALLOW_LIST and not self.allow:
            raise ValueError("mode 'allow_list' needs at least one entry in 'allow'; without any host it is mode 'none'")
        if self.mode is not NetworkMode.ALLOW_LIST and self.allow:
            raise ValueError(f"'allow' means nothing in mode '{self.mode}': set the mode to 'allow_list'")
        return self


class LimitSettings(_Settings):
    """Bounds on what runs inside, see `sandboxes.protocol.Limits`."""

    memory_mb: int = Field(default=_DEFAULTS.memory_mb, ge=64, le=4_194_304, description="Of all processes together.")
    processes: int = Field(default=_DEFAULTS.processes, ge=8, le=100_000)
    disk_mb: int = Field(default=_DEFAULTS.disk_mb, ge=1, le=4_194_304, description="Of each writable place.")
    flood_mb: int = Field(default=_DEFAULTS.flood_mb, ge=1, le=1_048_576, description="Printed by one command.")
    wall_seconds: float | None = Field(default=_DEFAULTS.wall_seconds, gt=0, le=604_800, description="Of the whole sandbox.")
    file_size_mb: int = Field(default=_DEFAULTS.file_size_mb, ge=1, le=4_194_304)
    open_files: int = Field(default=_DEFAULTS.open_files, ge=64, le=1_048_576, description="Of each process.")
    cpus: float | None = Field(default=_DEFAULTS.cpus, gt=0, le=4096, description="Null: all of the node.")
    output_bytes: int = Field(
        default=_DEFAULTS.output_bytes, ge=1024, le=16_777_216, description="Kept of one command; the middle is cut."
    )


class SandboxSettings(_Settings):
    """For a field `sandbox: SandboxSettings = SandboxSettings()` of a configuration."""

    image: str = Field(default="", max_length=200, description="A registered image; empty: the node's own system, read-only.")
    changes: Changes = Field(
        default=Changes.MEMORY,
        description="Where changes to the image go: memory, disk, or refused. They end with the sandbox.",
    )
    fakeroot: bool = Field(default=False, description="The agent is root inside, and an unprivileged user of the node.")
    network: NetworkSettings = NetworkSettings()
    limits: LimitSettings = LimitSettings()

    def to_spec(self, *, image: str = "", env: Mapping[str, str] | None = None, binds: tuple[Bind, ...] = ()) -> SandboxSpec:
        """The sandbox that is asked for. `image` is a task's own, which goes before that of the settings."""
        return SandboxSpec(
            limits=Limits(**self.limits.model_dump()),
            env=env or {},
            binds=binds,
            image=image or self.image,
            changes=self.changes,
            fakeroot=self.fakeroot,
            network=NetworkPolicy(self.network.mode, self.network.allow),
        )
