"""The persistent bash behind the `bash` verb."""

from __future__ import annotations

import contextlib
import os
import signal

from .descriptors import SHELL_COMMAND, SHELL_OUTPUT, SHELL_STATUS
from .processes import interrupt_descendants, send, spawn, working_directory
from .tool import Settings, Tool, close_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .loop import Loop
    from .processes import Moment

# Interactive, because only an interactive bash survives an interrupt: it drops the command and reads on. The switches remove
# what is meant for a human at a terminal. The command comes in a file that bash can seek in; a pipe it would read bytewise.
_ARGV = ("/bin/bash", "--norc", "--noprofile", "--noediting", "-i", "+H", "+o", "history")
_SETUP = b"PS1= PS2= HISTFILE=\n"
_RUN = (
    b"IFS= \\builtin read -r -d '' -u %(command)d __command\n"
    b'\\builtin eval "$__command" </dev/null >&%(output)d 2>&1 %(status)d>&- %(output)d>&- %(command)d<&-\n'
    b"\\builtin printf '%%d\\n' \"$?\" >&%(status)d\n"
) % {b"command": SHELL_COMMAND, b"output": SHELL_OUTPUT, b"status": SHELL_STATUS}


class Shell(Tool):
    """Commands are evaluated in one bash: its variables, functions and directory stay.

    The three lines of `_RUN` are read by bash one after the other, so the exit code is reported even when the second one was
    aborted by an interrupt or an expansion error.
    """

    adopts_orphans = True

    def __init__(self, loop: Loop, settings: Settings, tools: Sequence[Tool]) -> None:
        super().__init__(loop, settings, tools)
        self._lines = self._status = self._command = -1
        self._reported = b""

    def _start_child(self, output: int) -> int:
        lines_reader, self._lines = os.pipe()
        self._status, status_writer = os.pipe()
        self._command = os.memfd_create("command")
        null = os.open(os.devnull, os.O_RDWR)
        pid = spawn(
            _ARGV,
            env=self._settings.env,
            cwd=self.cwd,
            descriptors={
                0: lines_reader,
                1: null,
                2: null,
                SHELL_STATUS: status_writer,
                SHELL_OUTPUT: output,
                SHELL_COMMAND: self._command,
            },
            limits=self._settings.rlimits,
            adopts_orphans=self.adopts_orphans,
        )
        close_all(lines_reader, status_writer, null)
        self._reported = b""
        self._loop.watch(self._status, self._on_status)
        os.write(self._lines, _SETUP)
        return pid

    def _hand_over(self, text: str) -> None:
        data = text.encode("utf-8", "surrogateescape") + b"\0"
        os.ftruncate(self._command, 0)
        os.pwrite(self._command, data, 0)
        os.lseek(self._command, 0, os.SEEK_SET)  # the offset is shared with bash
        os.write(self._lines, b"".join(_export(name, value) for name, value in self._news.items()) + _RUN)

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

    def _result(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        self._note_directory()
        return {"exit_code": outcome["exit_code"], "cwd": self.cwd}

    def _on_status(self, _events: int) -> None:
        data = os.read(self._status, 4096)
        self._reported += data
        line, newline, _ = self._reported.partition(b"\n")
        if newline and line.isdigit():
            self._reported = b""
            self._finish({"exit_code": int(line)}, restarted=False)
        elif not data:
            self._loop.unwatch(self._status)
            self._on_channel_closed()
        elif newline:
            self._kill_child()  # the command wrote to the shell's own descriptors: its reports are worth nothing any more

    def _note_directory(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(OSError):  # it ended just now: the last known directory has to do
                self.cwd = working_directory(self.pid)


def _export(name: str, value: str) -> bytes:
    quoted = value.replace("'", "'\\''")
    return f"\\builtin export {name}='{quoted}'\n".encode()
