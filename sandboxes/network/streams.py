"""The host's end of forwarded ports: connections made inside a sandbox, as asyncio streams. No Django.

The frames are described in `sandboxes.broker.forward`. The broker is not trusted: it can send no more than it was granted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from sandboxes.broker.framing import MAX_STREAMS, STREAM_CHUNK, STREAM_WINDOW
from sandboxes.errors import SandboxProtocolError
from sandboxes.protocol import Serve

logger = logging.getLogger(__name__)

_HIGH_WATER = 64 * 1024
_LOW_WATER = 16 * 1024

Send = Callable[[Mapping[str, Any], bytes], None]


class Streams:
    """The connections to one forwarded port. `send` puts a frame of it on the channel; `sandbox` is a name, for messages."""

    def __init__(self, sandbox: str, serve: Serve, send: Send) -> None:
        self.send = send
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # once the broker listens
        self._sandbox = sandbox
        self._serve = serve
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._failures = 0

    def on_frame(self, header: Mapping[str, Any], payload: bytes) -> None:
        """Raises SandboxProtocolError for what no honest broker sends."""
        if not self.port.done():
            self._listening(header.get("port"))
            return
        number = header.get("stream")
        if header.get("open") is True:
            self._open(number)
            return
        stream = self._streams.get(number) if type(number) is int else None
        if stream is None:
            if type(number) is not int or not 0 < number <= self._last:
                raise self._nonsense(f"stream {number!r} was never opened")
            return  # it crossed our last frame
        if header.get("eof") is True:
            stream.end_received()
        elif header.get("reset") is True:
            stream.break_off()
        elif "credit" in header:
            if not stream.add_credit(header["credit"]):
                raise self._nonsense(f"stream {number}: credit of {header['credit']!r} for less data")
        elif not stream.received(payload):
            raise self._nonsense(f"stream {number}: {len(payload)} bytes that were not asked for")

    def break_off(self) -> None:
        """The session is over: every connection breaks, and what serves it is cancelled."""
        for stream in list(self._streams.values()):
            stream.break_off()

    async def wait_ended(self) -> None:
        """Until nothing serves any more, after `break_off`."""
        await asyncio.gather(*(stream.task for stream in self._streams.values()), return_exceptions=True)

    def finished(self, number: int, *, abort: bool) -> None:
        """Frees the stream's place on both sides."""
        del self._streams[number]
        self.send({"stream": number, "closed": True, "abort": abort}, b"")

    def failed(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures.bit_count() == 1:  # what runs inside may try it for ever
            logger.warning("%s: a forwarded connection failed: %r (%d so far)", self._sandbox, error, self._failures)

    def _listening(self, port: object) -> None:
        if type(port) is not int or not 0 < port < 65536:
            raise self._nonsense(f"port {port!r}")
        self.port.set_result(port)

    def _open(self, number: object) -> None:
        if type(number) is not int or number <= self._last:
            raise self._nonsense(f"stream {number!r} is not a new one")
        if len(self._streams) >= MAX_STREAMS:
            raise self._nonsense(f"more than {MAX_STREAMS} streams")
        self._last = number
        self._streams[number] = _Stream(self, number, self._serve)

    def _nonsense(self, what: str) -> SandboxProtocolError:
        return SandboxProtocolError(f"{self._sandbox}: the broker sent nonsense: {what}")


class _Stream(asyncio.Transport):
    """What is below the StreamReader and StreamWriter of one connection. It ends with what serves it."""

    def __init__(self, streams: Streams, number: int, serve: Serve) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._number = number
        self._unsent = bytearray()
        self._credit = STREAM_WINDOW  # bytes we may send
        self._room = STREAM_WINDOW  # bytes the broker may send
        self._consumed = 0  # of these, what it was not yet given back
        self._reading = True
        self._writing_paused = False
        self._end_received = False
        self._end_wanted = self._end_sent = False
        self._closing = self._lost = self._aborted = self._served = self._finished = False
        reader = asyncio.StreamReader(loop=self._loop)
        self._protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        self._protocol.connection_made(self)
        # Kept until the end: a writer that is forgotten before it is closed complains.
        self._writer = asyncio.StreamWriter(self, self._protocol, reader, self._loop)
        self.task = self._loop.create_task(_run(serve, reader, self._writer))
        self.task.add_done_callback(self._on_served)

    # What comes from the broker.

    def received(self, data: bytes) -> bool:
        """False for more than was granted."""
        self._room -= len(data)
        if self._room < 0 or self._end_received:
            return False
        if not self._closing:
            self._protocol.data_received(data)
            self._consumed += len(data)
            self._grant()
        return True

    def end_received(self) -> None:
        if not self._end_received:
            self._end_received = True
            if not self._closing:
                self._protocol.eof_received()

    def add_credit(self, credit: object) -> bool:
        """False for more than was sent."""
        if type(credit) is not int or not 0 < credit <= STREAM_WINDOW - self._credit:
            return False
        self._credit += credit
        self.pump()
        return True

    def break_off(self) -> None:
        """The other end is gone."""
        self._drop(ConnectionResetError("the connection inside the sandbox broke"))
        self.task.cancel()

    def pump(self) -> None:
        """Send what may be sent."""
        while self._unsent and self._credit:
            size = min(STREAM_CHUNK, self._credit, len(self._unsent))
            piece = bytes(memoryview(self._unsent)[:size])
            del self._unsent[:size]
            self._credit -= size
            self._streams.send({"stream": self._number}, piece)
        if self._writing_paused and len(self._unsent) <= _LOW_WATER:
            self._writing_paused = False
            self._protocol.resume_writing()
        if not self._unsent:
            if self._end_wanted and not self._end_sent and not self._lost:
                self._end_sent = True
                self._streams.send({"stream": self._number, "eof": True}, b"")
            if self._closing:
                self._lose(None)

    # asyncio.Transport.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._end_wanted and not self._closing:
            raise RuntimeError("write after write_eof")
        if self._closing or not data:
            return
        self._unsent += data
        self.pump()
        if len(self._unsent) > _HIGH_WATER and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def write_eof(self) -> None:
        self._end_wanted = True
        self.pump()

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._grant()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True
        self.write_eof()

    def abort(self) -> None:
        self._aborted = True
        self._drop(None)

    # Its end.

    def _grant(self) -> None:
        if self._reading and not self._closing and self._consumed >= STREAM_WINDOW // 2:
            self._room += self._consumed
            self._streams.send({"stream": self._number, "credit": self._consumed}, b"")
            self._consumed = 0

    def _drop(self, error: Exception | None) -> None:
        self._unsent.clear()
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        self._closing = True
        if not self._lost:
            self._lost = True
            self._loop.call_soon(self._protocol.connection_lost, error)
            self._finish()

    def _on_served(self, task: asyncio.Task[None]) -> None:
        self._served = True
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._streams.failed(error)
        if task.cancelled() or error is not None:
            self.abort()
        self.close()
        self._finish()

    def _finish(self) -> None:
        """Both conditions come true once, one of them last."""
        if self._served and self._lost and not self._finished:
            self._finished = True
            self._streams.finished(self._number, abort=self._aborted)


async def _run(serve: Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await serve(reader, writer)
