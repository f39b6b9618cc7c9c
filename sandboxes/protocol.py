"""What a sandbox backend must do, and what the rest of the platform may ask of a running sandbox.

Every backend passes the same conformance suite (`manage.py sandbox_selfcheck BACKEND`); that suite is the contract, this file
is its table of contents. No Django here.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Protocol


@dataclass(frozen=True)
class Limits:
    """Bounds on what runs inside. How a sandbox's are enforced is in `SandboxInfo.enforced`.

    Exceeding one of the first group ends the command that did it, with `limit_exceeded`; the others are errors to programs.
    """

    memory_mb: int = 2048  # of all processes together
    processes: int = 128
    disk_mb: int = 1024  # of each writable place: the home, /tmp, and the changes to an image
    flood_mb: int = 256  # printed by one command
    wall_seconds: float | None = None  # of the whole sandbox

    file_size_mb: int = 256
    open_files: int = 1024
    cpus: float | None = None  # None: all of the host
    output_bytes: int = 64 * 1024  # kept of one command; the middle is cut, and the result says how much


@dataclass(frozen=True)
class Bind:
    """A host path shown read-only inside."""

    source: str
    target: str


class NetworkMode(enum.StrEnum):
    """What a sandbox can reach."""

    NONE = "none"  # itself, and the ports that `Session.forward` opens
    ALLOW_LIST = "allow_list"  # also the listed hosts, through an HTTP proxy at a forwarded port
    FULL = "full"  # everything that the host can reach, its loopback included; refused where the node does not permit it


@dataclass(frozen=True)
class NetworkPolicy:
    """`allow` is for ALLOW_LIST: "pypi.org" and "*.example.org" mean ports 80 and 443, "example.org:8443" that one."""

    mode: NetworkMode = NetworkMode.NONE
    allow: tuple[str, ...] = ()


class Changes(enum.StrEnum):
    """Where what is changed in an image's files goes. Either way it ends with the sandbox."""

    MEMORY = "memory"  # counts as memory of the node
    DISK = "disk"  # below the backend's state directory
    REFUSED = "refused"  # the image is read-only; the home and /tmp are writable as always


@dataclass(frozen=True)
class SandboxSpec:
    """What an environment asks for. `env` is the whole environment besides PATH, HOME, LANG and TMPDIR.

    `image` names a registered image; "" is the host's own system, read-only, without the host's data. With `fakeroot` the agent
    is root inside, which still means an unprivileged user of the host.
    """

    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    binds: tuple[Bind, ...] = ()
    image: str = ""
    changes: Changes = Changes.MEMORY
    fakeroot: bool = False
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    dead_man_seconds: float = 600.0  # the broker ends itself when no host spoke to it for this long


class RootKind(enum.StrEnum):
    """What a sandbox's root file system is made from."""

    HOST = "host"  # the host's /usr and little else
    DIRECTORY = "directory"  # a root file system, unpacked
    SIF = "sif"  # an Apptainer image file


@dataclass(frozen=True)
class Root:
    """A root file system on this host: what an image's name was resolved to. `digest` identifies its contents.

    `env` are variables that the image sets (its PATH, for instance); those of the spec replace them.
    """

    kind: RootKind = RootKind.HOST
    path: str = ""
    digest: str = ""
    env: tuple[tuple[str, str], ...] = ()


HOST = Root()


@dataclass(frozen=True)
class CommandResult:
    """One `bash` command, or what more there is of it. `exit_code` is None when it was ended, or goes on (`running`)."""

    exit_code: int | None
    output: str  # stdout and stderr interleaved, decoded as UTF-8 with replacement; what was not returned before
    cwd: str
    duration: float  # seconds since it began, measured inside
    timed_out: bool = False
    truncated_bytes: int = 0  # cut from the middle of `output`, where a note says so
    restarted: bool = False  # the shell ended with this command: the next one starts in `cwd`, without variables and functions
    running: bool = False  # it printed nothing for `quiet_timeout` and goes on: see `Session.bash_input`
    limit_exceeded: str = ""  # the field of Limits, when it was ended for exceeding it


@dataclass(frozen=True)
class Picture:
    """An image that a cell displayed: data of the given MIME type."""

    mime: str
    data: bytes = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the data, in hex."""
        return hashlib.sha256(self.data).hexdigest()


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
    limit_exceeded: str = ""  # as in CommandResult
    pictures: tuple[Picture, ...] = ()


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


Output = Callable[[bytes], None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Session(Protocol):
    """A connection of one host process to one sandbox's broker. Many requests may be in flight.

    Raises `SandboxLost` when the sandbox is gone, `LimitExceeded` when it was ended because of what ran inside,
    `SandboxProtocolError` when its broker speaks nonsense or refuses a request as malformed (a command with a NUL character),
    and `SandboxFileError` from the file methods. Cancelling a pending call kills what it started inside.
    """

    async def ping(self) -> float: ...

    async def bash(
        self,
        command: str,
        *,
        timeout: float,
        quiet_timeout: float | None = None,
        on_output: Output | None = None,
        leaves_nothing: bool = False,
    ) -> CommandResult:
        """Run a command in the persistent shell, on a terminal.

        It is killed after `timeout` seconds. When it prints nothing for `quiet_timeout` seconds the call returns with `running`
        and the command goes on, its timeout too. `on_output` gets what is printed as it comes. What it leaves running
        goes on, unless it was killed, or `leaves_nothing`: then that is killed when the command ends.
        """
        ...

    async def bash_input(
        self, data: bytes, *, timeout: float, quiet_timeout: float | None = None, on_output: Output | None = None
    ) -> CommandResult:
        """Type `data` into the terminal of the running command (b"\x03" is Ctrl-C, b"" only waits), and go on as `bash` does.

        `timeout` replaces the command's. When it has ended since, the result is the rest of it, and `data` goes nowhere. Raises
        SandboxProtocolError when no result of a command is outstanding, InputRefused for more than 64 KiB that the program does
        not read, and for lines of more than 4095 bytes to one that reads lines.
        """
        ...

    async def python(self, code: str, *, timeout: float, on_output: Output | None = None) -> PythonResult: ...

    async def interrupt_python(self) -> None:
        """Deliver KeyboardInterrupt to the cell that runs, if any."""
        ...

    async def restart_python(self) -> None:
        """End the interpreter; the next cell gets a new one."""
        ...

    async def set_env(self, variables: Mapping[str, str]) -> None:
        """Set environment variables for all commands and cells that begin after this, also in a new shell or interpreter."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = 10 * 1024 * 1024) -> bytes: ...

    async def write_file(self, path: str, data: bytes) -> None: ...

    def download(self, path: str) -> AsyncGenerator[bytes]:
        """A file of any size, in pieces. Close it (`contextlib.aclosing`) to end it early."""
        ...

    async def upload(self, path: str, pieces: AsyncIterable[bytes]) -> None:
        """Create or replace a file of any size. It has its name only once it is whole."""
        ...

    async def list_files(self, path: str) -> list[FileEntry]: ...

    async def forward(self, serve: Serve, *, port: int = 0) -> int:
        """Listen at a loopback port inside (0: a free one) and let `serve` answer each connection here, until the session ends.

        Works whatever the network policy is. Returns the port.
        """
        ...

    async def until_lost(self) -> NoReturn:
        """Wait until the sandbox is gone and raise `SandboxLost` or `LimitExceeded`, so that nothing goes on without it."""
        ...

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

    async def start(self, name: str, spec: SandboxSpec, root: Root = HOST) -> SandboxInfo:
        """Start detached and return once the broker answers; `root` is what `spec.image` stands for on this host.

        Raises `SandboxStartFailed`, `SandboxExists`, and `BackendUnavailable` when other starts would fail as well.
        """
        ...

    async def connect(self, name: str) -> Session:
        """Connect from any process of this host and user. Raises `SandboxLost`, `LimitExceeded`."""
        ...

    async def rename(self, name: str, new_name: str) -> None:
        """Give a running sandbox another name. Raises `SandboxExists`, `SandboxLost`."""
        ...

    async def stop(self, name: str) -> None:
        """Kill everything inside, prove that nothing is left, remove its files. Idempotent; an unknown name is fine.

        Raises `TeardownFailed` when a process survives.
        """
        ...

    async def list(self) -> list[str]:
        """Names of all sandboxes of this state directory, also half-started and dead ones."""
        ...
