"""Serves connections: reads requests, hands them to verbs, writes answers."""

from __future__ import annotations

import time

from .files import FileFailure
from .forward import open_forward
from .framing import MAX_FRAME, FrameError, FrameReader, encode
from .interpreter import Interpreter
from .lean import accepted, socket
from .loop import READ, WRITE, Loop
from .processes import kill_everything
from .shell import Shell
from .tool import BadRequest, Settings, Tool
from .verbs import Verbs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_MAX_UNSENT = 2 * MAX_FRAME
_MAX_HELD = 2 * MAX_FRAME  # payloads of requests that are not answered
_MAX_PENDING = 1000
_MAX_CONNECTIONS = 64
_MAX_MESSAGE = 2000
_CONGESTED = 1024 * 1024


class Server:
    """Accepts connections on a listening socket, and stops the loop when no host has said anything for too long."""

    def __init__(self, loop: Loop, listener: socket.socket, settings: Settings, dead_man: float) -> None:
        self.loop = loop
        siblings: list[Tool] = []
        shell, interpreter = Shell(loop, settings, siblings), Interpreter(loop, settings, siblings)
        siblings += [shell, interpreter]
        self.tools: dict[str, Tool] = {"bash": shell, "python": interpreter}
        self.verbs: dict[str, Callable[[Request], None]] = Verbs(loop, settings, shell, interpreter).table()
        self.verbs["ping"] = lambda request: request.answer({"dead_man_seconds": dead_man})
        self.verbs["forward"] = lambda request: open_forward(loop, request)
        self._listener = listener
        self._dead_man = dead_man
        self._last_frame = time.monotonic()
        self._connections: set[Connection] = set()
        self._last_words: dict[str, Any] | None = None  # once the sandbox was ended
        listener.setblocking(False)
        loop.watch(listener.fileno(), self._on_connection)
        loop.call_later(dead_man, self._on_silence)

    def end(self, limit: str, message: str) -> None:
        """Kill everything and serve no more, because of what ran inside; whoever is or gets connected is told."""
        self._last_words = {"id": 0, "failure": {"kind": "limit", "message": message, "limit": limit}}
        for connection in list(self._connections):
            connection.end(self._last_words)
        kill_everything()

    def note_frame(self) -> None:
        """A host is alive. That it is connected says nothing: it may be frozen."""
        self._last_frame = time.monotonic()

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def _on_silence(self) -> None:
        left = self._last_frame + self._dead_man - time.monotonic()
        if left > 0:
            self.loop.call_later(left, self._on_silence)
        else:
            self.loop.stop()

    def _on_connection(self, _events: int) -> None:
        try:
            peer = accepted(self._listener)
        except OSError:
            return  # the peer is already gone
        if len(self._connections) >= _MAX_CONNECTIONS:
            peer.close()
            return
        connection = Connection(self, peer)
        self._connections.add(connection)
        if self._last_words is not None:
            connection.end(self._last_words)


class Request:
    """One request, from its frame to its answer.

    A verb that goes on after its handler returned sets `on_cancel`, which is called when the host cancels the request or its
    connection ends, and `on_more` when the host sends it more frames than the first.
    """

    def __init__(self, connection: Connection, number: int, header: dict[str, Any], payload: bytes) -> None:
        self.header = header
        self.payload = payload
        self.connection = connection
        self.on_cancel: Callable[[], None] | None = None
        self.on_more: Callable[[dict[str, Any], bytes], None] | None = None
        self._number = number

    @property
    def is_congested(self) -> bool:
        """Whether the host is slow to read what it is sent: what can wait should, or grow no more."""
        return self.connection.unsent_bytes > _CONGESTED

    def send_more(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a frame before the answer."""
        self.connection.send({"id": self._number, "more": True, **header}, payload)

    def answer(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """The last frame. Called exactly once, also after `on_cancel`."""
        self.connection.forget(self._number)
        self.connection.send({"id": self._number, **header}, payload)

    def fail(self, kind: str, message: str, **details: str) -> None:
        """The last frame, when the request cannot be carried out; kinds as in `framing`."""
        self.answer({"failure": {"kind": kind, "message": message[:_MAX_MESSAGE], **details}})

    def run(self, step: Callable[[], None]) -> None:
        """Call `step`, turning what it refuses into the answer."""
        try:
            step()
        except BadRequest as error:
            self.fail(error.kind, str(error))
        except FileFailure as error:
            self.fail("file", str(error), reason=error.reason)


class Connection:
    """One host process. What it asked for and is still running when it goes away is ended, as if cancelled."""

    def __init__(self, server: Server, peer: socket.socket) -> None:
        self._server = server
        self._peer = peer
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._is_waiting = False  # until the peer takes more
        self._pending: dict[int, Request] = {}
        self._held = 0
        self._open = True
        self._serves = True
        peer.setblocking(False)
        server.loop.watch(peer.fileno(), self._on_ready)

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def forget(self, number: int) -> None:
        self._held -= len(self._pending.pop(number).payload)

    def end(self, last_words: Mapping[str, Any]) -> None:
        """Cancel what is asked for, and ignore what will be; the host closes the connection when it has read why."""
        self.send(last_words, b"")
        self._serves = False
        self._abandon_requests()

    def send(self, header: Mapping[str, Any], payload: bytes) -> None:
        if not self._open or not self._serves:
            return
        self._unsent += encode(header, payload)
        if len(self._unsent) > _MAX_UNSENT:
            self._close()  # a peer that asks but never reads
        else:
            self._flush()

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & ~WRITE and self._open:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._peer.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        try:
            for header, payload in self._frames.feed(data):
                self._on_frame(header, payload)
        except FrameError:
            self._close()

    def _on_frame(self, header: dict[str, Any], payload: bytes) -> None:
        if not self._serves:
            return
        self._server.note_frame()
        number, verb = header.get("id"), header.get("verb")
        if type(number) is not int:
            raise FrameError("a request needs an integer id")
        request = self._pending.get(number)
        if verb == "cancel":
            if request is not None and request.on_cancel is not None:
                request.on_cancel()
        elif header.get("more"):
            on_more = None if request is None else request.on_more
            if request is not None and on_more is not None:
                request.run(lambda: on_more(header, payload))
        elif request is not None:
            raise FrameError(f"id {number} is already in use")
        else:
            self._begin(Request(self, number, header, payload), number)

    def _begin(self, request: Request, number: int) -> None:
        self._held += len(request.payload)
        if self._held > _MAX_HELD or len(self._pending) == _MAX_PENDING:
            raise FrameError("too much is asked for at once")
        self._pending[number] = request
        verb: object = request.header.get("verb")
        handler = self._server.verbs.get(verb) if isinstance(verb, str) else None
        if handler is None:
            request.fail("invalid", f"unknown verb {verb!r}")
        else:
            request.run(lambda: handler(request))

    def _flush(self) -> None:
        try:
            sent = self._peer.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close()
            return
        del self._unsent[:sent]
        if bool(self._unsent) != self._is_waiting:
            self._is_waiting = bool(self._unsent)
            self._server.loop.watch(self._peer.fileno(), self._on_ready, READ | WRITE if self._unsent else READ)

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._server.loop.unwatch(self._peer.fileno())
        self._peer.close()
        if self._serves:
            self._abandon_requests()
        self._server.forget(self)

    def _abandon_requests(self) -> None:
        for request in list(self._pending.values()):
            if request.on_cancel is not None:
                request.on_cancel()
        for tool in self._server.tools.values():
            tool.abandon(self)
