"""What a source gets to make an image with: a workspace, a log, programs and threads that end when the build is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from sandboxes.images.errors import BuildFailed, Interrupted
from sandboxes.images.states import Format
from sandboxes.images.store import Entry
from sandboxes.images.unpack import Unpacker
from sandboxes.protocol import Backend

P = ParamSpec("P")
R = TypeVar("R")

RESERVE_BYTES = 1 << 30  # of the store's file system that builds leave alone

_KILL_SECONDS = 2.0
# A worker that is killed takes its programs along: its end of the pipe closes, and the whole process group is killed. A signal
# at the parent's death (PR_SET_PDEATHSIG) reaches one process only, and mmdebstrap's helpers outlive theirs.
_LEASH = """
exec 3<&0 </dev/null
trap : TERM
"$@" 3<&- & program=$!
{ read -r _ <&3; kill -KILL 0; } & watcher=$!
while wait "$program"; status=$?; kill -0 "$program" 2>/dev/null; do :; done
kill -KILL "$watcher" 2>/dev/null
exit "$status"
"""
_TAIL_LINES = 12
_LONGEST_LINE = 2000
# What programs get of our environment: where things are, and the way to mirrors and package indexes.
_PASSED = ("PATH", "HOME", "LANG", "USER", "LOGNAME", "TMPDIR")
_PASSED_PREFIXES = ("PIP_", "SSL_CERT_", "REQUESTS_CA_")
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


class Monitor(Protocol):
    """Where a build says how far it is. Called from the build's loop and from its threads."""

    def line(self, text: str) -> None: ...

    def progress(self, share: float, step: str) -> None: ...


@dataclass(frozen=True)
class Made:
    """What a source made, in the workspace: a root file system or a SIF file."""

    path: Path
    format: Format
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Job:
    """One try to make one image.

    `owner` is the host user that its files shall belong to, None for our own; `room` how many bytes it may take; `base` the
    image that its source builds upon, if any; `backend` starts the sandboxes that it is built in, named after `name`;
    `apptainer` is the program, "" the first that is found.
    """

    name: str
    workspace: Path
    owner: int | None
    room: int
    monitor: Monitor
    format: Format
    backend: Backend
    base: Entry | None = None
    apptainer: str = ""
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="image"))
    _stopped: threading.Event = field(default_factory=threading.Event)
    whole: float = 0.9  # which part of all is the source's own; the rest is for adding it to the store
    _part: tuple[float, float] = (0.0, 1.0)
    step_text: str = ""

    def say(self, text: str) -> None:
        """A line for the log."""
        self.monitor.line(text[:_LONGEST_LINE])

    def step(self, text: str, begin: float, end: float) -> None:
        """What is done now, and which part of the whole it is."""
        self._part, self.step_text = (begin * self.whole, end * self.whole), text
        self.say(f"== {text}")
        self.done(0.0)

    def done(self, share: float) -> None:
        """How much of the step is done, 0 to 1."""
        begin, end = self._part
        self.monitor.progress(begin + (end - begin) * min(max(share, 0.0), 1.0), self.step_text)

    def meter(self, total: int) -> Callable[[int], None]:
        """To be told of bytes as they are read, of `total` in this step."""
        read = 0

        def count(n: int) -> None:
            nonlocal read
            read += n
            self.done(read / max(total, 1))

        return count

    def check(self) -> None:
        """For threads: raises Interrupted when the build was cancelled."""
        if self._stopped.is_set():
            raise Interrupted

    def unpacker(self, root: Path) -> Unpacker:
        """To fill a root file system with, a new one if it is not there."""
        if not root.is_dir():
            self.folder(root.name)
        return Unpacker(root, owner=self.owner, room=self.room, check=self.check)

    def folder(self, name: str) -> Path:
        """A directory in the workspace that belongs to `owner`, for programs that run as that user."""
        folder = self.workspace / name
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
        if self.owner is not None:
            os.chown(folder, self.owner, self.owner)
        return folder

    async def in_thread(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what takes long and calls `check`. Returns, or is cancelled, only when it has ended."""
        future = asyncio.get_running_loop().run_in_executor(self.threads, lambda: function(*args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._stopped.set()
            with contextlib.suppress(Interrupted, BuildFailed, OSError):
                await future
            raise

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        stdout: int | None = None,
        env: Mapping[str, str] | None = None,
        user: int | None = None,
        retryable: bool = False,
        hopeless: re.Pattern[str] | None = None,
        milestones: Sequence[str] = (),
    ) -> None:
        """Run a program of the host; what it prints goes to the log (with `stdout`, a descriptor, only its errors).

        `user` is the host user it runs as, None for our own; `milestones` are how lines begin that tell how far it is. Raises
        BuildFailed, as `program_failure` has it.
        """
        name = Path(command[0]).name
        try:
            process = await asyncio.create_subprocess_exec(
                *("sh", "-c", _LEASH, "leash"),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if stdout is None else stdout,
                stderr=asyncio.subprocess.STDOUT if stdout is None else asyncio.subprocess.PIPE,
                env={**program_environment(), **(env or {})},
                cwd=self.workspace,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except OSError as error:
            raise BuildFailed(f"{name} cannot be started: {error.strerror}") from error
        output = process.stdout or process.stderr
        assert output is not None  # noqa: S101 - one of the two is a pipe
        tail: deque[str] = deque(maxlen=_TAIL_LINES)

        def say(line: str) -> None:
            tail.append(line)
            self.say(line)
            for passed, milestone in enumerate(milestones, 1):
                if line.startswith(milestone):
                    self.done(passed / (len(milestones) + 1))

        lines = Lines(say)
        try:
            async with asyncio.timeout(timeout):
                while data := await output.read(1 << 16):
                    lines.feed(data)
                lines.end()
                status = await process.wait()
        except TimeoutError:
            raise BuildFailed(f"{name} was ended after {timeout:.0f} s", retryable=retryable) from None
        finally:
            await _end(process)
        if status != 0:
            raise program_failure(f"{name} ended with status {status}", tail, retryable=retryable, hopeless=hopeless)


def program_failure(what: str, printed: Iterable[str], *, retryable: bool, hopeless: re.Pattern[str] | None) -> BuildFailed:
    """The failure of a program, with the end of what it printed; or only with the lines in which it says what is `hopeless`.

    Such a failure is not retryable: a package that does not exist will not exist in a minute.
    """
    lines = list(printed)
    if said := [line for line in lines if hopeless and hopeless.search(line)]:
        return BuildFailed("\n".join([f"{what}:", *said]))
    return BuildFailed("\n".join([f"{what}:", *lines]), retryable=retryable)


def program_environment() -> dict[str, str]:
    """What a program that builds is told of our environment: no secrets of the platform."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES) or name.lower() in _PROXIES
    }


class Lines:
    """Output, in whatever pieces it comes, as lines: a progress bar that rewrites one counts as many, and long ones are cut."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._one(line)
        if len(self._rest) > _LONGEST_LINE:
            self.end()

    def end(self) -> None:
        self._one(self._rest)
        self._rest = b""

    def _one(self, line: bytes) -> None:
        if line.strip():
            self._say(line.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """The program and what it has started: asked first, so that it removes what it made."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await process.wait()
            break
        except TimeoutError:
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
