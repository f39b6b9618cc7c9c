"""Serves connections: reads requests, hands them to verbs, writes answers."""

from __future__ import annotations

import socket

from .files import FileFailure
from .forward import open_forward
from .framing import MAX_FRAME, FrameError, FrameReader, encode
from .interpreter import Interpreter
from .loop import READ, WRITE, Loop
from .shell import Shell
from .tool import Settings, Tool
from .verbs import BadRequest, Verbs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .loop import Timer

_MAX_UNSENT = 2 * MAX_FRAME
_MAX_HELD = 2 * MAX_FRAME  # payloads of requests that are not answered
_MAX_PENDING = 1000
_CONGESTED = 1024 * 1024


class Server:
    """Accepts connections on a listening socket, and stops the loop when no host has been connected for too long."""

    def __init__(self, loop: Loop, listener: socket.socket, settings: Settings, dead_man: float) -> None:
        self.loop = loop
        self.tools: dict[str, Tool] = {}
        siblings: list[Tool] = []
        self.tools["bash"] = Shell(loop, settings, siblings)
        self.tools["python"] = Interpreter(loop, settings, siblings)
        siblings.extend(self.tools.values())
        self.verbs: dict[str, Callable[[Request], None]] = Verbs(settings, self.tools).table()
        self.verbs["forward"] = lambda request: open_forward(loop, request)
        self._listener = listener
        self._dead_man = dead_man
        self._connections: set[Connection] = set()
        self._timer: Timer | None = None
        listener.setblocking(False)
        loop.watch(listener.fileno(), self._on_connection)
        self._arm_dead_man()

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._arm_dead_man()

    def _arm_dead_man(self) -> None:
        self._timer = self.loop.call_later(self._dead_man, self.loop.stop)

    def _on_connection(self, _events: int) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # the peer is already gone
        if self._timer is not None:
            self._timer.cancel()
        self._connections.add(Connection(self, peer))


class Request:
    """One request, from its frame to its answer.

    A verb that goes on after its handler returned sets `on_cancel`, which is called when the host cancels the request or its
    connection ends, and `on_more` when the host sends it more frames than the first.
    """

    def __init__(self, connection: Connection, number: int, header: dict[str, Any], payload: bytes) -> None:
        self.header = header
        self.payload = payload
        self.on_cancel: Callable[[], None] | None = None
        self.on_more: Callable[[dict[str, Any], bytes], None] | None = None
        self._connection = connection
        self._number = number

    @property
    def is_congested(self) -> bool:
        """Whether the host is slow to read what it is sent: what can wait should, or grow no more."""
        return self._connection.unsent_bytes > _CONGESTED

    def send_more(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a frame before the answer."""
        self._connection.send({"id": self._number, "more": True, **header}, payload)

    def answer(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """The last frame. Called exactly once, also after `on_cancel`."""
        self._connection.forget(self._number)
        self._connection.send({"id": self._number, **header}, payload)

    def fail(self, kind: str, message: str, **details: str) -> None:
        """The last frame, when the request cannot be carried out; kinds as in `framing`."""
        self.answer({"failure": {"kind": kind, "message": message, **details}})

    def run(self, step: Callable[[], None]) -> None:
        """Call `step`, turning what it refuses into the answer."""
        try:
            step()
        except BadRequest as error:
            self.fail("invalid", str(error))
        except FileFailure as error:
            self.fail("file", str(error), reason=error.reason)


class Connection:
    """One host process. What it asked for and is still running when it goes away is ended, as if cancelled."""

    def __init__(self, server: Server, peer: socket.socket) -> None:
        self._server = server
        self._peer = peer
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._pending: dict[int, Request] = {}
        self._held = 0
        self._open = True
        peer.setblocking(False)
        server.loop.watch(peer.fileno(), self._on_ready)

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def forget(self, number: int) -> None:
        self._held -= len(self._pending.pop(number).payload)

    def send(self, header: Mapping[str, Any], payload: bytes) -> None:
        if not self._open:
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
        self._server.loop.watch(self._peer.fileno(), self._on_ready, READ | WRITE if self._unsent else READ)

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._server.loop.unwatch(self._peer.fileno())
        self._peer.close()
        for request in list(self._pending.values()):
            if request.on_cancel is not None:
                request.on_cancel()
        self._server.forget(self)
