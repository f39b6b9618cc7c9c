"""What the shell and the interpreter share: one child process, one request at a time, timeouts that leave nothing behind."""

from __future__ import annotations

import os
import time

from .lean import deque, signal
from .output import BoundedOutput
from .processes import Moment, kill_descendants, rlimits, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from .loop import Loop, Timer
    from .output import LiveOutput, OutputPipe
    from .terminal import Terminal
    from .watchdog import Watchdog

    Answer = Callable[[Mapping[str, Any], bytes], None]


class BadRequest(Exception):
    """A well-formed request for something impossible."""

    kind = "invalid"


class Call:
    """A host's request that waits for what becomes of a job. `owner` is its connection."""

    def __init__(
        self, answer: Answer, owner: object, live: LiveOutput | None = None, quiet_timeout: float | None = None
    ) -> None:
        self.owner = owner
        self.live = live
        self.quiet_timeout = quiet_timeout
        self._answer = answer

    def answer(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """Called exactly once."""
        if self.live is not None:
            self.live.close()
        self._answer(header, payload)

    def fail(self, kind: str, message: str) -> None:
        self.answer({"failure": {"kind": kind, "message": message}})


class Job:
    """One piece of work for a tool. `call` waits for it; None while it goes on without.

    With `leaves_nothing`, what it started is killed when it ends by itself, too.
    """

    def __init__(self, text: str, timeout: float, call: Call, *, leaves_nothing: bool = False) -> None:
        self.text = text
        self.timeout = timeout
        self.leaves_nothing = leaves_nothing
        self.call: Call | None = call
        self.owner = call.owner
        self.timed_out = False
        self.cancelled = False
        self.limit_exceeded = ""

    @property
    def is_ended(self) -> bool:
        """Whether it was decided that it must not go on."""
        return self.timed_out or self.cancelled or bool(self.limit_exceeded)


class Settings:
    """What every child process of the broker gets."""

    def __init__(
        self, limits: Mapping[str, int], env: Mapping[str, str], programs: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.env = dict(env)
        self._programs = programs or {}
        self.rlimits = rlimits(limits)
        self.output_bytes = limits["output_bytes"]
        self.max_file_bytes = limits["file_size_mb"] * 1024 * 1024

    def command(self, name: str) -> list[str]:
        """How to start bash or python3: what the agent gets by that name, else the host's."""
        for directory in self.env.get("PATH", "").split(":"):
            path = f"{directory}/{name}"
            if path.startswith("/") and os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113 - no pathlib here
                return [path]
        return self.lent(name) or [f"/usr/bin/{name}"]

    def lent(self, name: str) -> list[str]:
        """How to start the host's, where the root is an image; else empty."""
        return list(self._programs.get(name, ()))


class Tool:
    """Runs jobs in order in a child that keeps its state between them.

    At a timeout the job is interrupted like with Ctrl-C; if that does not end it within `grace` seconds, the child is killed
    and the next job gets a new one. Either way, whatever the job started and is still there is killed.
    Subclasses say how to start the child, hand it a job and interrupt it.
    """

    grace = 0.5
    adopts_orphans = False  # whether the child is the parent of what its descendants orphan; else the broker is

    def __init__(self, loop: Loop, settings: Settings, tools: Sequence[Tool]) -> None:
        self._loop = loop
        self._settings = settings
        self.tools = tools  # all of them, this one included
        self._kept = BoundedOutput(settings.output_bytes)
        self._output: OutputPipe | Terminal | None = None
        self._waiting: deque[Job] = deque()
        self._job: Job | None = None
        self._timer: Timer | None = None
        self._started = 0.0
        self._since: Moment | None = None
        self.printed = 0  # bytes, by the running job or since the last one
        self.watchdog: Watchdog | None = None
        self._ending = False  # the child was killed and is not reaped yet
        self.pid: int | None = None
        self._news: dict[str, str] = {}  # environment variables that the running child has not been told of
        self.cwd = settings.env.get("HOME", "/")

    @property
    def job_since(self) -> Moment | None:
        """When the running job began; None when none runs."""
        return None if self._job is None else self._since

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        self._next()

    def cancel(self, job: Job) -> None:
        """End a job of this tool: at once when it waits, as at its timeout when it runs."""
        if job is self._job and not job.cancelled:
            job.cancelled = True
            self._interrupt()
        elif job in self._waiting:
            self._waiting.remove(job)
            if job.call is not None:
                job.call.fail("cancelled", "cancelled before it started")

    def abandon(self, owner: object) -> None:
        """A host went away: cancel what it asked for, also a command that it left running."""
        for job in (*self._waiting, self._job):
            if job is not None and job.owner is owner:
                self.cancel(job)

    def exceed(self, limit: str, *, replace_child: bool = False) -> None:
        """End the running job, if any, with all it started, because it exceeded `limit`, a field of `Limits`.

        With `replace_child` the child is ended too, because it is what holds too much.
        """
        if self._job is not None:
            self._job.limit_exceeded = limit
            self._kill_leftovers()
            self._interrupt()
        if replace_child:
            self._kill_child()

    def note_env(self, variables: Mapping[str, str]) -> None:
        """These were set in the common settings: a running child learns them with its next job."""
        if self.pid is not None:
            self._news.update(variables)

    # What subclasses provide.

    def _open_output(self) -> OutputPipe | Terminal:
        """Where the child shall print; what arrives there goes to `_on_output`."""
        raise NotImplementedError

    def _start_child(self, output: int) -> int:
        """Start the child with `output` as its stdout and stderr, and return its pid."""
        raise NotImplementedError

    def _hand_over(self, text: str) -> None:
        """Make the child work on `text`, after it has taken over `_news` into its environment."""
        raise NotImplementedError

    def _send_interrupt(self, pid: int, since: Moment) -> None:
        """Deliver the equivalent of Ctrl-C."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close what belonged to the child, which has ended."""
        raise NotImplementedError

    def _result(self, outcome: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The answer's own fields, and what precedes the output in its payload.

        `outcome` is what the child reported, or {"exit_code": n} when it ended instead.
        """
        raise NotImplementedError

    # The life of a job.

    def _next(self) -> None:
        while self._job is None and self._waiting and not self._ending:
            job = self._job = self._waiting.popleft()
            self._started = time.monotonic()
            try:
                self._begin(job)
            except OSError as error:
                if self.pid is not None:
                    self._kill_child()  # it is there but does not listen; its end will finish the job
                    return
                self._job = None
                if job.call is not None:
                    job.call.fail("unusable", f"cannot start: {error}")

    def _begin(self, job: Job) -> None:
        if self._output is None:
            self._output = self._open_output()
        if self.pid is None:
            self._news.clear()
            self.pid = self._start_child(self._output.writer)
            self._loop.on_exit(self.pid, self._on_exit)
        self._since = Moment()
        self.printed = 0
        self._hand_over(job.text)
        self._news.clear()
        self._set_timeout(job.timeout)
        if self.watchdog is not None:
            self.watchdog.on_begin(self)

    def _set_timeout(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        if self._job is not None:
            self._job.timed_out = True
            self._interrupt()

    def _on_output(self, data: bytes) -> None:
        self._kept.add(data)
        self.printed += len(data)
        if self._job is not None and self._job.call is not None and self._job.call.live is not None:
            self._job.call.live.add(data)

    def _interrupt(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.pid is not None and self._since is not None:
            self._timer = self._loop.call_later(self.grace, self._kill_child)
            self._send_interrupt(self.pid, self._since)

    def _kill_child(self) -> None:
        """The child does not come back by itself: end it. `_on_exit` then finishes the job."""
        if self.pid is not None:
            self._ending = True
            send(self.pid, signal.SIGSTOP)  # so that it starts nothing more while its descendants are hunted
            if self._job is not None:
                self._kill_leftovers()
            send(self.pid, signal.SIGKILL)

    def _kill_leftovers(self) -> None:
        if self._since is None:
            return
        if self.pid is not None:
            kill_descendants(self.pid, self._since)
        if self.pid is None or not self.adopts_orphans:
            tools = [tool.pid for tool in self.tools if tool.pid is not None]
            kill_descendants(os.getpid(), self._since, tools)

    def _finish(self, outcome: Mapping[str, Any], *, restarted: bool) -> None:
        job = self._job
        if job is None or self._output is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if job.is_ended or job.leaves_nothing:
            self._kill_leftovers()
        self._output.drain()
        if self.watchdog is not None and not job.limit_exceeded:
            job.limit_exceeded = self.watchdog.on_end(self)
            if job.limit_exceeded:
                self._kill_leftovers()
        self.printed = 0
        self._job = None
        header, payload = self._result(outcome)
        header.update(
            timed_out=job.timed_out,
            limit_exceeded=job.limit_exceeded,
            restarted=restarted,
            duration=time.monotonic() - self._started,
        )
        self._deliver(job, header, payload)
        self._next()

    def _deliver(self, job: Job, header: dict[str, Any], payload: bytes) -> None:
        """Answer the call that waits for `job`."""
        output, header["truncated_bytes"] = self._kept.take()
        if job.call is None:
            return
        if job.cancelled:
            job.call.fail("cancelled", "cancelled")
        else:
            job.call.answer(header, payload + output)

    def _on_exit(self, exit_code: int) -> None:
        self._release()
        self.pid = None
        self._ending = False
        self._finish({"exit_code": exit_code}, restarted=True)
        self._next()

    def _on_channel_closed(self) -> None:
        """The child can report nothing more. It is ending, or became another program, which may take its time."""
        if self._job is None:
            self._kill_child()


def close_all(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)
