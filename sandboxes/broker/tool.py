"""What the shell and the interpreter share: one child process, one request at a time, timeouts that leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections import deque

from .output import OutputPipe
from .processes import Moment, kill_descendants, rlimits, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from .loop import Loop, Timer
    from .watchdog import Watchdog

    Answer = Callable[[Mapping[str, Any], bytes], None]


class Job:
    """One request to a tool. `answer(header, payload)` is called exactly once, unless the job is dropped before it starts."""

    def __init__(self, text: str, timeout: float, answer: Answer) -> None:
        self.text = text
        self.timeout = timeout
        self.answer = answer
        self.timed_out = False
        self.cancelled = False
        self.limit_exceeded = ""


class Settings:
    """What every child process of the broker gets."""

    def __init__(self, limits: Mapping[str, int], env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self.rlimits = rlimits(limits)
        self.output_bytes = limits["output_bytes"]
        self.max_file_bytes = limits["file_size_mb"] * 1024 * 1024


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
        self._output: OutputPipe | None = None
        self._waiting: deque[Job] = deque()
        self._job: Job | None = None
        self._timer: Timer | None = None
        self._started = 0.0
        self._since: Moment | None = None
        self._printed_before = 0
        self.watchdog: Watchdog | None = None
        self.pid: int | None = None
        self._news: dict[str, str] = {}  # environment variables that the running child has not been told of
        self.cwd = settings.env.get("HOME", "/")

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        self._next()

    def cancel(self, job: Job) -> None:
        """End a job of this tool: at once when it waits, as at its timeout when it runs."""
        job.cancelled = True
        if job is self._job:
            self._interrupt()
        else:
            self._waiting.remove(job)
            job.answer({"failure": {"kind": "cancelled", "message": "cancelled before it started"}}, b"")

    @property
    def job_since(self) -> Moment | None:
        """When the running job began; None when none runs."""
        return None if self._job is None else self._since

    @property
    def printed(self) -> int:
        """Bytes printed since the last job began."""
        return 0 if self._output is None else self._output.kept.total - self._printed_before

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

    def _result(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's own fields. `outcome` is what the child reported, or {"exit_code": n} when it ended instead."""
        raise NotImplementedError

    # The life of a job.

    def _next(self) -> None:
        while self._job is None and self._waiting:
            job = self._job = self._waiting.popleft()
            self._started = time.monotonic()
            try:
                self._begin(job)
            except OSError as error:
                if self.pid is not None:
                    self._kill_child()  # it is there but does not listen; its end will finish the job
                    return
                self._job = None
                job.answer({"failure": {"kind": "unusable", "message": f"cannot start: {error}"}}, b"")

    def _begin(self, job: Job) -> None:
        if self._output is None:
            self._output = OutputPipe(self._loop, self._settings.output_bytes)
        if self.pid is None:
            self._news.clear()
            self.pid = self._start_child(self._output.writer)
            self._loop.on_exit(self.pid, self._on_exit)
        self._since = Moment()
        self._printed_before = self._output.kept.total
        self._hand_over(job.text)
        self._news.clear()
        self._timer = self._loop.call_later(job.timeout, self._on_timeout)
        if self.watchdog is not None:
            self.watchdog.on_begin(self)

    def _on_timeout(self) -> None:
        if self._job is not None:
            self._job.timed_out = True
            self._interrupt()

    def _interrupt(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.pid is not None and self._since is not None:
            self._timer = self._loop.call_later(self.grace, self._kill_child)
            self._send_interrupt(self.pid, self._since)

    def _kill_child(self) -> None:
        """The child does not come back by itself: end it. `_on_exit` then finishes the job."""
        if self.pid is not None:
            send(self.pid, signal.SIGSTOP)  # so that it starts nothing more while its descendants are hunted
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
        if job.timed_out or job.cancelled or job.limit_exceeded:
            self._kill_leftovers()
        output, missing = self._output.take()
        if self.watchdog is not None and not job.limit_exceeded:
            job.limit_exceeded = self.watchdog.on_end(self)
        self._job = None
        if job.cancelled:
            job.answer({"failure": {"kind": "cancelled", "message": "cancelled"}}, b"")
        else:
            header = self._result(outcome)
            header.update(
                timed_out=job.timed_out,
                limit_exceeded=job.limit_exceeded,
                restarted=restarted,
                truncated_bytes=missing,
                duration=time.monotonic() - self._started,
            )
            job.answer(header, output)
        self._next()

    def _on_exit(self, exit_code: int) -> None:
        self._release()
        self.pid = None
        self._finish({"exit_code": exit_code}, restarted=True)

    def _on_channel_closed(self) -> None:
        """The child can report nothing more. It is ending, or became another program, which may take its time."""
        if self._job is None:
            self._kill_child()


def close_all(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)
