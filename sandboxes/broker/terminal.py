"""The pseudo-terminal on which commands run."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from .loop import READ, WRITE
from .tool import BadRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Loop

ENV = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "SYSTEMD_PAGER": "cat"}

_ROWS, _COLUMNS = 50, 200
_SIZE = struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0)
_LINE_DISCIPLINE = struct.pack("i", 0)  # the usual one
_CHUNK = 64 * 1024
_CAPACITY = 64 * 1024  # more than the kernel keeps between a program and us
_LONGEST_LINE = 4095
_MAX_TYPED = 64 * 1024


class InputRefused(BadRequest):
    """Input that would not all reach the program."""

    kind = "input"


class Terminal:
    """A terminal that does not echo and changes no byte on its way out; `sink` gets what is written to it.

    It is read all the time, like `OutputPipe`. `writer` is the programs' end.
    """

    def __init__(self, loop: Loop, sink: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._sink = sink
        self._master, self.writer = os.openpty()
        os.set_blocking(self._master, False)
        self._modes = _modes(termios.tcgetattr(self.writer))
        # Before a shell sees it: bash restores what it found when a program dies of a signal.
        termios.tcsetattr(self.writer, termios.TCSANOW, self._modes)
        self._typed = bytearray()
        loop.watch(self._master, self._on_ready)

    def prepare(self) -> None:
        """Undo what the last command did to the terminal, and drop what was typed and it did not read.

        Raises OSError when something in the background spoils it just now.
        """
        if self._typed:
            self._typed.clear()
            self._loop.watch(self._master, self._on_ready)
        os.set_blocking(self.writer, True)
        if fcntl.ioctl(self.writer, termios.TIOCGETD, _LINE_DISCIPLINE) != _LINE_DISCIPLINE:
            fcntl.ioctl(self.writer, termios.TIOCSETD, _LINE_DISCIPLINE)
        fcntl.ioctl(self.writer, termios.TIOCSWINSZ, _SIZE)
        try:
            termios.tcsetattr(self.writer, termios.TCSANOW, self._modes)
            termios.tcflow(self.writer, termios.TCOON)
            termios.tcflush(self.writer, termios.TCIFLUSH)
        except termios.error as error:
            raise OSError(*error.args) from None

    def type(self, data: bytes) -> None:
        """Type `data` as fast as it is read. Raises InputRefused for what would get lost."""
        if len(self._typed) + len(data) > _MAX_TYPED:
            raise InputRefused(f"more than {_MAX_TYPED} bytes of input that the program did not read")
        if self._takes_lines() and any(len(line) > _LONGEST_LINE for line in data.split(b"\n")):
            raise InputRefused(f"a terminal takes lines of at most {_LONGEST_LINE} bytes: write longer ones to a file")
        self._typed += data
        self._send_typed()

    def drain(self) -> None:
        """Take in all that was written before this call.

        The kernel passes it on some time after it was written, but finishes that before it says that there is nothing to read.
        Beside a flood from the background it never says so; then more has come than can have been on its way.
        """
        taken = 0
        while taken <= _CAPACITY and (data := self._read()):
            self._sink(data)
            taken += len(data)

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._send_typed()
        if events & ~WRITE:
            data = self._read()
            if data:
                self._sink(data)

    def _takes_lines(self) -> bool:
        try:
            return bool(termios.tcgetattr(self.writer)[3] & termios.ICANON)
        except termios.error:
            return False  # a program gave it another line discipline

    def _send_typed(self) -> None:
        try:
            sent = os.write(self._master, self._typed) if self._typed else 0
        except BlockingIOError:
            sent = 0
        del self._typed[:sent]
        self._loop.watch(self._master, self._on_ready, READ | WRITE if self._typed else READ)

    def _read(self) -> bytes:
        try:
            return os.read(self._master, _CHUNK)
        except BlockingIOError:
            return b""


def _modes(modes: list[Any]) -> list[Any]:
    """Lines are edited and control characters send signals, as programs expect; output passes as it is.

    Without NOFLSH an interrupt would drop what was printed and is still on its way.
    """
    _, _, control, _, input_speed, output_speed, characters = modes
    local = termios.ISIG | termios.ICANON | termios.IEXTEN | termios.NOFLSH
    return [termios.ICRNL, 0, control, local, input_speed, output_speed, characters]
