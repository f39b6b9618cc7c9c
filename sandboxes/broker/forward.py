"""Forwarded ports: listeners at the sandbox's loopback whose connections are carried to the host as streams.

A request `{"id": 7, "verb": "forward", "port": 8080}` (0: a free port) stays open for as long as the port does. The broker
sends `{"id": 7, "more": true, "port": 8080}` once it listens. Each connection becomes a stream, numbered from 1 on, with frames
`{"id": 7, "more": true, "stream": 3, ...}`:

    both             a payload          data
    both             "credit": n        n bytes of the other side's data are consumed: as many more may be sent
    both             "eof": true        no more data from this side
    broker to host   "open": true       always the first: a connection was accepted
    broker to host   "reset": true      the connection broke
    host to broker   "closed": true     always the last: deliver what was sent, and close; with "abort": true, reset it

Each side may have STREAM_WINDOW bytes of a stream on the way, so a stream that nobody reads holds up no other and takes little
memory. A port has MAX_STREAMS at most, further connections inside wait; only the host's last frame frees a place.
"""

from __future__ import annotations

import struct

from .framing import MAX_STREAMS, STREAM_CHUNK, STREAM_WINDOW, FrameError
from .lean import accepted, socket
from .loop import READ, WRITE
from .tool import BadRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .loop import Loop
    from .server import Request

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def open_forward(loop: Loop, request: Request) -> None:
    """The verb. Raises BadRequest when the port cannot be had."""
    port = request.header.get("port")
    if type(port) is not int or not 0 <= port < 65536:
        raise BadRequest("port is a number from 0 to 65535")
    try:
        Forward(loop, request, port)
    except OSError as error:
        raise BadRequest(f"port {port} cannot be forwarded: {error.strerror}") from None


class Forward:
    """One forwarded port: a listener and its streams, until its request is cancelled."""

    def __init__(self, loop: Loop, request: Request, port: int) -> None:
        """Raises OSError when the port cannot be had."""
        self.loop = loop
        self._request = request
        self._streams: dict[int, Stream] = {}
        self._last = 0
        self._listener = socket.socket()
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier session may just have had it
            self._listener.bind(("127.0.0.1", port))
            self._listener.listen(MAX_STREAMS)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        request.on_more = self._on_frame
        request.on_cancel = self._close
        request.send_more({"port": self._listener.getsockname()[1]})
        self._watch()

    def send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        self._request.send_more(header, payload)

    def _on_frame(self, header: dict[str, Any], payload: bytes) -> None:
        number = header.get("stream")
        stream = self._streams.get(number) if type(number) is int else None
        if stream is None:
            raise FrameError(f"no stream {number!r}")
        if header.get("closed") is True:
            del self._streams[stream.number]
            stream.end(abort=header.get("abort") is True)
            self._watch()
        elif header.get("eof") is True:
            stream.end_of_input()
        elif "credit" in header:
            stream.add_credit(header["credit"])
        else:
            stream.add_input(payload)

    def _watch(self) -> None:
        if len(self._streams) < MAX_STREAMS:
            self.loop.watch(self._listener.fileno(), self._accept)
        else:
            self.loop.unwatch(self._listener.fileno())

    def _accept(self, _events: int) -> None:
        try:
            peer = accepted(self._listener)
        except OSError:
            return  # the peer is already gone
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._last += 1
        self._streams[self._last] = stream = Stream(self, self._last, peer)
        self.send({"stream": self._last, "open": True})
        stream.watch()
        self._watch()

    def _close(self) -> None:
        self.loop.unwatch(self._listener.fileno())
        self._listener.close()
        for stream in self._streams.values():
            stream.end(abort=True)
        self._streams.clear()
        self._request.fail("cancelled", "cancelled")


class Stream:
    """One connection inside. "Input" is what the host sends to it."""

    def __init__(self, forward: Forward, number: int, peer: socket.socket) -> None:
        self._forward = forward
        self.number = number
        self._peer: socket.socket | None = peer
        self._credit = STREAM_WINDOW  # bytes we may send to the host
        self._room = STREAM_WINDOW  # bytes the host may send to us
        self._consumed = 0  # of these, what it was not yet given back
        self._input = bytearray()
        self._input_ended = False
        self._ending = False
        self._read_all = False

    def add_input(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0 or self._input_ended:
            raise FrameError("data that was not asked for")
        if self._peer is not None:
            self._input += data
            self._write()

    def end_of_input(self) -> None:
        self._input_ended = True
        self._write()

    def add_credit(self, credit: object) -> None:
        if type(credit) is not int or not 0 < credit <= STREAM_WINDOW - self._credit:
            raise FrameError("credit for data that was not sent")
        self._credit += credit
        self.watch()

    def end(self, *, abort: bool) -> None:
        """The host is done with it: what is left to deliver is delivered, or dropped."""
        self._ending = True
        if abort and self._peer is not None:
            self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._close()
        else:
            self._write()

    def watch(self) -> None:
        """Wait for what can be acted on. Without that, nothing is watched: the end of a connection is always reported."""
        if self._peer is None:
            return
        events = WRITE if self._input else 0
        if self._credit and not self._read_all and not self._ending:
            events |= READ
        if events:
            self._forward.loop.watch(self._peer.fileno(), self._on_ready, events)
        else:
            self._forward.loop.unwatch(self._peer.fileno())

    def _on_ready(self, events: int) -> None:
        if self._input:
            self._write()
        if events & ~WRITE and not self._read_all and not self._ending and self._credit:
            self._read()

    def _read(self) -> None:
        if self._peer is None:
            return
        try:
            data = self._peer.recv(min(STREAM_CHUNK, self._credit))
        except BlockingIOError:
            return
        except OSError:
            self._reset()
            return
        if data:
            self._credit -= len(data)
            self._forward.send({"stream": self.number}, data)
        else:
            self._read_all = True
            self._forward.send({"stream": self.number, "eof": True})
        self.watch()

    def _write(self) -> None:
        if self._peer is None:
            return
        try:
            sent = self._peer.send(self._input) if self._input else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._reset()
            return
        del self._input[:sent]
        self._consumed += sent
        if self._ending and not self._input:
            self._close()
            return
        if self._consumed >= STREAM_WINDOW // 2 and not self._ending:
            self._room += self._consumed
            self._forward.send({"stream": self.number, "credit": self._consumed})
            self._consumed = 0
        if self._input_ended and not self._input:
            self._shut_down()
        self.watch()

    def _shut_down(self) -> None:
        if self._peer is not None:
            try:
                self._peer.shutdown(socket.SHUT_WR)
            except OSError:
                self._reset()

    def _reset(self) -> None:
        self._close()
        if not self._ending:
            self._forward.send({"stream": self.number, "reset": True})

    def _close(self) -> None:
        if self._peer is not None:
            self._forward.loop.unwatch(self._peer.fileno())
            self._peer.close()
            self._peer = None
            self._input.clear()
