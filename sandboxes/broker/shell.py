"""The persistent bash behind the `bash` verbs."""

from __future__ import annotations

import os
import time

from .descriptors import SHELL_COMMAND, SHELL_STATUS, SHELL_TERMINAL
from .lean import signal, suppress
from .processes import interrupt_descendants, send, spawn, working_directory
from .terminal import ENV, Terminal
from .tool import BadRequest, Call, Job, Settings, Tool, close_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .loop import Loop, Timer
    from .processes import Moment

# Interactive, because only an interactive bash survives an interrupt: it drops the command and reads on. The switches remove
# what is meant for a human at a terminal. Its own input is a pipe, so that nothing typed for a command reaches it. The command
# comes in a file that bash can seek in; the pipe it reads bytewise.
_OPTIONS = ("--norc", "--noprofile", "--noediting", "-i", "+H", "+o", "history")
_SETUP = b"PS1= PS2= HISTFILE=\n"
_RUN = (
    f"IFS= \\builtin read -r -d '' -u {SHELL_COMMAND} __command\n"
    f'\\builtin eval "$__command" <&{SHELL_TERMINAL} >&{SHELL_TERMINAL} 2>&1 '
    f"{SHELL_STATUS}>&- {SHELL_TERMINAL}>&- {SHELL_COMMAND}<&-\n"
    f"\\builtin printf '%s %d\\n' WORD \"$?\" >&{SHELL_STATUS}\n"
).encode()
_STILL_RUNNING = "a command is still running: go on with bash_input, which can also interrupt it"


class Shell(Tool):
    """Commands are evaluated in one bash: its variables, functions and directory stay.

    The three lines of `_RUN` are read by bash one after the other, so the exit code is reported even when the second one was
    aborted by an interrupt or an expansion error. The report carries a word that is new for each command, so that a command
    which writes where bash reports is not taken for bash.

    A command that prints nothing for the call's `quiet_timeout` goes on without a call; `type` attaches the next one.
    """

    adopts_orphans = True

    def __init__(self, loop: Loop, settings: Settings, tools: Sequence[Tool]) -> None:
        super().__init__(loop, settings, tools)
        self._lines = self._status = self._command = -1
        self._reported = self._word = b""
        self._terminal: Terminal | None = None
        self._last_print = 0.0
        self._quiet_timer: Timer | None = None
        self._unclaimed: tuple[object, dict[str, Any]] | None = None  # owner and result of a command that ended without a call

    def submit(self, job: Job) -> None:
        """Raises BadRequest while a command goes on without a call."""
        if self._job is not None and self._job.call is None:
            raise BadRequest(_STILL_RUNNING)
        super().submit(job)

    def abandon(self, owner: object) -> None:
        if self._unclaimed is not None and self._unclaimed[0] is owner:
            self._unclaimed = None
            self._kept.take()  # it is of no use to the next host
        super().abandon(owner)

    def cancel_running(self) -> None:
        if self._job is not None:
            self.cancel(self._job)

    def type(self, data: bytes, timeout: float, call: Call) -> None:
        """Type into the running command's terminal, and let `call` wait for what becomes of it. Raises BadRequest."""
        job = self._job
        if job is not None and self._terminal is not None:
            if job.call is not None:
                raise BadRequest("another call is waiting for the running command")
            self._terminal.type(data)
            if not job.is_ended:
                self._set_timeout(timeout)
            job.call, job.owner = call, call.owner
            if call.live is not None:
                call.live.add(self._kept.peek()[0])
            self._watch_quiet(call)
        elif self._unclaimed is not None:
            (_, header), self._unclaimed = self._unclaimed, None
            output, header["truncated_bytes"] = self._kept.take()
            call.answer(header, output)
        else:
            raise BadRequest("no command is running")

    def _open_output(self) -> Terminal:
        self._terminal = Terminal(self._loop, self._on_output)
        return self._terminal

    def _start_child(self, output: int) -> int:
        lines_reader, self._lines = os.pipe()
        self._status, status_writer = os.pipe()
        self._command = os.memfd_create("command")
        null = os.open(os.devnull, os.O_RDWR)
        pid = spawn(
            (*self._settings.command("bash"), *_OPTIONS),
            env={**ENV, **self._settings.env},
            cwd=self.cwd,
            descriptors={
                0: lines_reader,
                1: null,
                2: null,
                SHELL_STATUS: status_writer,
                SHELL_TERMINAL: output,
                SHELL_COMMAND: self._command,
            },
            limits=self._settings.rlimits,
            terminal=output,
            adopts_orphans=self.adopts_orphans,
        )
        close_all(lines_reader, status_writer, null)
        self._reported = b""
        self._loop.watch(self._status, self._on_status)
        os.write(self._lines, _SETUP)
        return pid

    def _begin(self, job: Job) -> None:
        unclaimed, self._unclaimed = self._unclaimed, None
        super()._begin(job)
        if job.call is not None:
            self._watch_quiet(job.call)
        if unclaimed is not None and unclaimed[1]["limit_exceeded"]:
            self.exceed(unclaimed[1]["limit_exceeded"])  # the host must learn of it

    def _hand_over(self, text: str) -> None:
        if self._terminal is not None:
            self._terminal.prepare()
        data = text.encode("utf-8", "surrogateescape") + b"\0"
        os.ftruncate(self._command, 0)
        os.pwrite(self._command, data, 0)
        os.lseek(self._command, 0, os.SEEK_SET)  # the offset is shared with bash
        self._word = os.urandom(8).hex().encode()
        lines = [_export(name, value) for name, value in self._news.items()]
        os.write(self._lines, b"".join(lines) + _RUN.replace(b"WORD", self._word))

    def _send_interrupt(self, pid: int, since: Moment) -> None:
        # The shell first: it must know of the interrupt when it learns that its child died of one.
        send(pid, signal.SIGINT)
        interrupt_descendants(pid, since)

    def _kill_child(self) -> None:
        self._note_directory()
        super()._kill_child()

    def _release(self) -> None:
        self._loop.unwatch(self._status)
        close_all(self._lines, self._status, self._command)

    def _result(self, outcome: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        self._note_directory()
        return {"exit_code": outcome["exit_code"], "cwd": self.cwd, "running": False}, b""

    def _deliver(self, job: Job, header: dict[str, Any], payload: bytes) -> None:
        if self._quiet_timer is not None:
            self._quiet_timer.cancel()
        if job.call is None and not job.cancelled:
            self._unclaimed = job.owner, header  # and its output stays where it is
        else:
            super()._deliver(job, header, payload)

    def _on_output(self, data: bytes) -> None:
        self._last_print = time.monotonic()
        super()._on_output(data)

    def _watch_quiet(self, call: Call) -> None:
        if call.quiet_timeout is not None:
            self._last_print = time.monotonic()
            self._quiet_timer = self._loop.call_later(call.quiet_timeout, self._on_quiet)

    def _on_quiet(self) -> None:
        call = None if self._job is None else self._job.call
        if self._job is None or call is None or call.quiet_timeout is None:
            return
        left = self._last_print + call.quiet_timeout - time.monotonic()
        if left > 0:
            self._quiet_timer = self._loop.call_later(left, self._on_quiet)
            return
        self._job.call = None
        self._note_directory()
        output, missing = self._kept.take()
        header: dict[str, Any] = {"exit_code": None, "cwd": self.cwd, "running": True, "timed_out": False, "limit_exceeded": ""}
        header |= {"restarted": False, "truncated_bytes": missing, "duration": time.monotonic() - self._started}
        call.answer(header, output)
        while self._waiting:
            waiting = self._waiting.popleft().call
            if waiting is not None:
                waiting.fail("invalid", _STILL_RUNNING)

    def _on_status(self, _events: int) -> None:
        data = os.read(self._status, 4096)
        self._reported += data
        line, newline, _ = self._reported.partition(b"\n")
        word, _, code = line.partition(b" ")
        if newline and word == self._word and code.isdigit():
            self._reported = b""
            self._finish({"exit_code": int(code)}, restarted=False)
        elif not data:
            self._loop.unwatch(self._status)
            self._on_channel_closed()
        elif newline:
            self._kill_child()  # the command wrote to the shell's own descriptors: its reports are worth nothing any more

    def _note_directory(self) -> None:
        if self.pid is not None:
            with suppress(OSError):  # it ended just now: the last known directory has to do
                self.cwd = working_directory(self.pid)


def _export(name: str, value: str) -> bytes:
    quoted = value.replace("'", "'\\''")
    return f"\\builtin export {name}='{quoted}'\n".encode()
