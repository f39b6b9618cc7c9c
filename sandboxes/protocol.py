"""What a sandbox backend must do, and what the rest of the platform may ask of a running sandbox.

Every backend passes the same conformance suite (`manage.py sandbox_selfcheck BACKEND`); that suite is the contract, this file
is its table of contents. No Django here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Limits:
    """Bounds on what runs inside. What a backend could really enforce is in `SandboxInfo.enforced`."""

    memory_mb: int = 2048
    processes: int = 128
    file_size_mb: int = 256
    disk_mb: int = 1024  # of each writable place: the home and /tmp
    open_files: int = 1024
    output_bytes: int = 64 * 1024  # per command; the middle is cut, and the result says how much


@dataclass(frozen=True)
class Bind:
    """A host path shown read-only inside."""

    source: str
    target: str


@dataclass(frozen=True)
class SandboxSpec:
    """What to start. Network is always off; `env` is the whole environment besides PATH, HOME, LANG and TMPDIR."""

    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    binds: tuple[Bind, ...] = ()
    dead_man_seconds: float = 600.0  # the broker ends itself when no host spoke to it for this long


@dataclass(frozen=True)
class CommandResult:
    """One `bash` command. `exit_code` is None when it was killed at its timeout."""

    exit_code: int | None
    output: str  # stdout and stderr interleaved, decoded as UTF-8 with replacement
    cwd: str
    duration: float  # seconds, measured inside
    timed_out: bool = False
    truncated_bytes: int = 0  # cut from the middle of `output`, where a note says so
    restarted: bool = False  # the shell ended with this command: the next one starts in `cwd`, without variables and functions


@dataclass(frozen=True)
class PythonResult:
    """One `python` cell. `value` is the repr of a last expression that is not None; `error` is a traceback."""

    output: str
    value: str | None
    error: str | None
    duration: float
    timed_out: bool = False
    truncated_bytes: int = 0
    restarted: bool = False  # the interpreter ended with this cell, and all state is lost; `error` says so too


@dataclass(frozen=True)
class FileEntry:
    """One entry of `Session.list_files`."""

    path: str
    kind: str  # "file" | "directory" | "symlink" | "other"
    size: int


@dataclass(frozen=True)
class SandboxInfo:
    """What a backend knows of a sandbox it started. `enforced` maps a limit's name to the mechanism, or "none"."""

    name: str
    backend: str
    pid: int
    started_at: float  # unix seconds
    enforced: Mapping[str, str]


class Session(Protocol):
    """A connection of one host process to one sandbox's broker. Many requests may be in flight.

    Raises `SandboxLost` when the sandbox is gone, `SandboxProtocolError` when its broker speaks nonsense or refuses a request
    as malformed (a command with a NUL character), and `SandboxFileError` from the file methods.
    Cancelling a pending `bash` or `python` call kills what that command started inside.
    """

    async def ping(self) -> float: ...

    async def bash(self, command: str, *, timeout: float) -> CommandResult: ...

    async def python(self, code: str, *, timeout: float) -> PythonResult: ...

    async def set_env(self, variables: Mapping[str, str]) -> None:
        """Set environment variables for all commands and cells that begin after this, also in a new shell or interpreter."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = 10 * 1024 * 1024) -> bytes: ...

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def list_files(self, path: str) -> list[FileEntry]: ...

    async def close(self) -> None: ...


class Backend(Protocol):
    """Starts and stops isolated roots on this host.

    A name is chosen by the caller before the start (`prorl-<rollout>-<attempt>`), so that a crash at any await point leaves
    something `list` finds and `stop` removes.
    """

    name: str
    state_dir: Path  # has a private directory per sandbox, called like it, with the channel to its broker (`sandboxes.channel`)

    async def probe(self) -> Mapping[str, str]:
        """What this host supports: binary, version, and for each limit how it is enforced. Raises `BackendUnavailable`."""
        ...

    async def start(self, name: str, spec: SandboxSpec) -> SandboxInfo:
        """Start detached and return once the broker answers. Raises `SandboxStartFailed`, `SandboxExists`."""
        ...

    async def connect(self, name: str) -> Session:
        """Connect from any process of this host and user. Raises `SandboxLost`."""
        ...

    async def stop(self, name: str) -> None:
        """Kill everything inside, prove that nothing is left, remove its files. Idempotent; an unknown name is fine.

        Raises `TeardownFailed` when a process survives.
        """
        ...

    async def list(self) -> list[str]:
        """Names of all sandboxes of this state directory, also half-started and dead ones."""
        ...
