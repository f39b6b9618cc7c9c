"""What a command prints: bounded in memory, and sent to the host as it comes when asked for."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from .lean import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .loop import Loop, Timer
    from .server import Request

_CHUNK = 64 * 1024
_INTERVAL = 0.02  # seconds between two frames of live output


class BoundedOutput:
    """Keeps the first and the last half of `limit` bytes, and counts what it drops between them."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def add(self, data: bytes) -> None:
        self._seen += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + _CHUNK:  # trimmed now and then: each trim moves the whole tail
            del self._tail[: len(self._tail) - self._tail_limit]

    def peek(self) -> tuple[bytes, int]:
        """(what was kept with a note where bytes are missing, number of bytes missing)."""
        if self._seen <= self._head_limit + self._tail_limit:
            return bytes(self._head + self._tail), 0
        head, tail = self._head[:], self._tail[len(self._tail) - self._tail_limit :]
        _cut_to_character_end(head)
        _cut_to_character_start(tail)
        missing = self._seen - len(head) - len(tail)
        return bytes(head) + b"\n[... %d bytes cut ...]\n" % missing + bytes(tail), missing

    def take(self) -> tuple[bytes, int]:
        """The same, and start afresh."""
        result = self.peek()
        self._head, self._tail, self._seen = bytearray(), bytearray(), 0
        return result


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


class LiveOutput:
    """Sends what is printed to the host while the command runs.

    At most one frame in `_INTERVAL`, none while the host is slow to read. What does not fit into `limit` bytes of a frame is
    cut from its middle, with the same note as in the result.
    """

    def __init__(self, loop: Loop, request: Request, limit: int) -> None:
        self._loop = loop
        self._request = request
        self._waiting = BoundedOutput(limit)
        self._timer: Timer | None = None

    def add(self, data: bytes) -> None:
        self._waiting.add(data)
        if self._timer is None:
            self._send()

    def close(self) -> None:
        """Send the rest; the answer comes next."""
        if self._timer is not None:
            self._timer.cancel()
        self._send_waiting()

    def _send(self) -> None:
        self._timer = None
        if self._request.is_congested or self._send_waiting():
            self._timer = self._loop.call_later(_INTERVAL, self._send)

    def _send_waiting(self) -> bool:
        data, _ = self._waiting.take()
        if data:
            self._request.send_more({}, data)
        return bool(data)


class OutputPipe:
    """The pipe behind stdout and stderr of one tool; `sink` gets what is written to it.

    It is read all the time, so that a background process never blocks on it. What such a process prints between two commands
    is part of the next command's output, as in a terminal.
    """

    def __init__(self, loop: Loop, sink: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        loop.watch(self._reader, self._on_readable)

    def drain(self) -> None:
        """Take in all that was written before this call."""
        # Exactly what is in the pipe now: reading until it is empty would never end beside a busy background process.
        waiting = struct.unpack("i", fcntl.ioctl(self._reader, termios.FIONREAD, b"\0\0\0\0"))[0]
        while waiting > 0:
            data = os.read(self._reader, min(waiting, _CHUNK))
            self._sink(data)
            waiting -= len(data)

    def _on_readable(self, _events: int) -> None:
        with suppress(BlockingIOError):  # `drain` may have come first since this was seen to be readable
            self._sink(os.read(self._reader, _CHUNK))
