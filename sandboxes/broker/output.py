"""What a command prints: read from a pipe that outlives the command, bounded in memory."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loop import Loop

_CHUNK = 64 * 1024


class BoundedOutput:
    """Keeps the first and the last half of `limit` bytes, and counts what it drops between them."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0
        self.total = 0  # of all times

    def add(self, data: bytes) -> None:
        self._seen += len(data)
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + _CHUNK:  # trimmed now and then: each trim moves the whole tail
            del self._tail[: len(self._tail) - self._tail_limit]

    def take(self) -> tuple[bytes, int]:
        """(what was kept with a note where bytes are missing, number of bytes missing); starts afresh."""
        head, tail, seen = self._head, self._tail, self._seen
        self._head, self._tail, self._seen = bytearray(), bytearray(), 0
        if seen <= self._head_limit + self._tail_limit:
            return bytes(head + tail), 0
        del tail[: len(tail) - self._tail_limit]
        _cut_to_character_end(head)
        _cut_to_character_start(tail)
        missing = seen - len(head) - len(tail)
        return bytes(head) + b"\n[... %d bytes cut ...]\n" % missing + bytes(tail), missing


def _cut_to_character_end(data: bytearray) -> None:
    """Drop a UTF-8 sequence that the cut left incomplete at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:  # a continuation byte: its first byte is further left
            continue
        needs = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        if needs > back:
            del data[-back:]
        return


def _cut_to_character_start(data: bytearray) -> None:
    """Drop the rest of a UTF-8 sequence whose start was cut away."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    del data[:start]


class OutputPipe:
    """The pipe behind stdout and stderr of one tool.

    It is read all the time, so that a background process never blocks on it. What such a process prints between two commands
    is part of the next command's output, as in a terminal.
    """

    def __init__(self, loop: Loop, limit: int) -> None:
        self.kept = BoundedOutput(limit)
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        loop.watch(self._reader, self._on_readable)

    def take(self) -> tuple[bytes, int]:
        """All output written before this call, as `BoundedOutput.take`."""
        # Exactly what is in the pipe now: reading until it is empty would never end beside a busy background process.
        waiting = struct.unpack("i", fcntl.ioctl(self._reader, termios.FIONREAD, b"\0\0\0\0"))[0]
        while waiting > 0:
            data = os.read(self._reader, min(waiting, _CHUNK))
            self.kept.add(data)
            waiting -= len(data)
        return self.kept.take()

    def _on_readable(self, _events: int) -> None:
        self.kept.add(os.read(self._reader, _CHUNK))
