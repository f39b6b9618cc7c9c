"""The host's end of the channel to a broker: frames, requests in flight, signs of life. No Django."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping
from typing import Any, cast

from sandboxes.broker.framing import FrameError, FrameReader, encode
from sandboxes.errors import InputRefused, LimitExceeded, SandboxError, SandboxFileError, SandboxLost, SandboxProtocolError

Answer = tuple[dict[str, Any], bytes]
OnMore = Callable[[dict[str, Any], bytes], None]

_LONGEST_PAUSE = 15.0  # seconds between two pings
_SILENCE = 60.0  # seconds after which a broker that does not answer a ping is given up


class Call:
    """A request on its way. Leaving its `with` block before the answer cancels it."""

    def __init__(self, wire: Wire, number: int, path: str, on_more: OnMore | None) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.on_more = on_more
        self._wire = wire
        self._number = number
        self._path = path

    def send_more(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a frame after the request. Does nothing when the connection has ended: the answer tells."""
        if self._wire.broken is None:
            self._wire.send({"id": self._number, "more": True, **header}, payload)

    async def result(self) -> Answer:
        """Raises what the broker's failure stands for, or why the connection ended."""
        header, payload = await self.answer
        if "failure" in header:
            raise self._error(header["failure"])
        return header, payload

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._wire.leave(self._number)

    def _error(self, failure: object) -> SandboxError:
        details = failure if isinstance(failure, dict) else {}
        kind, message = details.get("kind"), f"{self._wire.sandbox}: {details.get('message')}"
        if kind == "file":
            return SandboxFileError(str(details.get("reason")), self._path, str(details.get("message")))
        if kind == "input":
            return InputRefused(str(details.get("message")))
        return SandboxLost(message) if kind == "unusable" else SandboxProtocolError(message)


class Wire(asyncio.Protocol):
    """A connection to the broker of `sandbox` (a name, for messages only); made by `open`.

    It pings by itself, so that the broker knows of a living host also while nothing is asked. Whatever the broker sends is
    either what it was asked for, or ends the connection.
    """

    def __init__(self, sandbox: str) -> None:
        self.sandbox = sandbox
        self.broken: SandboxError | None = None
        self._frames = FrameReader()
        self._ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._left: set[int] = set()  # cancelled calls that the broker has not answered yet
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, sandbox: str, peer: socket.socket) -> Wire:
        """Take over `peer`, a connected non-blocking socket."""
        _, wire = await asyncio.get_running_loop().create_unix_connection(lambda: cls(sandbox), sock=peer)
        return wire

    def call(self, verb: str, payload: bytes = b"", on_more: OnMore | None = None, **arguments: object) -> Call:
        """Send a request; `on_more` gets the frames that come before its answer. Raises SandboxError."""
        number = next(self._ids)
        self.send({"id": number, "verb": verb, **arguments}, payload)
        call = self._calls[number] = Call(self, number, str(arguments.get("path")), on_more)
        return call

    def send(self, header: dict[str, object], payload: bytes = b"") -> None:
        if self.broken is not None or self._transport is None:
            raise self.broken or SandboxLost(f"{self.sandbox}: not connected")
        try:
            self._transport.write(encode(header, payload))
        except FrameError as error:
            raise SandboxProtocolError(f"{self.sandbox}: the request is too large: {error}") from None

    def leave(self, number: int) -> None:
        """Cancel a request, unless it is answered."""
        if self._calls.pop(number, None) is not None and self.broken is None:
            self._left.add(number)
            self.send({"id": number, "verb": "cancel"})

    async def until_closed(self) -> None:
        await asyncio.shield(self._closed)

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            await self.until_closed()

    def fail(self, error: SandboxError) -> None:
        """End the connection and everything that waits for it."""
        if self.broken is None:
            self.broken = error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(self.broken)
                call.answer.exception()  # nobody has to look at it

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send_ping()

    def data_received(self, data: bytes) -> None:
        try:
            for header, payload in self._frames.feed(data):
                self._on_frame(header, payload)
                if self.broken is not None:
                    return
        except FrameError as error:
            self.fail(SandboxProtocolError(f"{self.sandbox}: {error}"))
        except SandboxProtocolError as error:
            self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(SandboxLost(f"{self.sandbox}: the broker closed the connection"))
        if not self._closed.done():
            self._closed.set_result(None)

    def _on_frame(self, header: dict[str, Any], payload: bytes) -> None:
        """Raises FrameError for what was not asked for."""
        number, is_last = header.get("id"), header.get("more") is not True
        if type(number) is not int:
            raise FrameError("an answer without an integer id")
        if number == 0:
            self.fail(self._last_words(header.get("failure")))
            return
        call = self._calls.get(number)
        if call is None:
            if number not in self._left:
                raise FrameError(f"an answer to request {number}, which was not made or is answered")
            if is_last:
                self._left.discard(number)
        elif is_last:
            del self._calls[number]
            if not call.answer.done():
                call.answer.set_result((header, payload))
        elif call.on_more is None:
            raise FrameError(f"more than an answer to request {number}")
        elif not call.answer.done():
            self._hand_on(call, call.on_more, header, payload)

    def _last_words(self, failure: object) -> SandboxError:
        details = failure if isinstance(failure, dict) else {}
        if details.get("kind") != "limit":
            return SandboxProtocolError(f"{self.sandbox}: a frame without a request")
        return LimitExceeded(str(details.get("limit")), f"{self.sandbox}: {details.get('message')}")

    def _hand_on(self, call: Call, on_more: OnMore, header: dict[str, Any], payload: bytes) -> None:
        try:
            on_more(header, payload)
        except (FrameError, SandboxProtocolError):
            raise
        except Exception as error:  # of the caller's own function
            call.answer.set_exception(error)

    # Signs of life.

    def _send_ping(self) -> None:
        self.call("ping").answer.add_done_callback(self._on_pong)
        self._timer = asyncio.get_running_loop().call_later(_SILENCE, self._on_silence)

    def _on_pong(self, answer: asyncio.Future[Answer]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.broken is None:
            dead_man: Any = answer.result()[0].get("dead_man_seconds")
            if type(dead_man) not in (int, float) or not dead_man > 0:
                self.fail(SandboxProtocolError(f"{self.sandbox}: a ping was answered without dead_man_seconds"))
                return
            self._timer = asyncio.get_running_loop().call_later(min(dead_man / 4, _LONGEST_PAUSE), self._send_ping)

    def _on_silence(self) -> None:
        self.fail(SandboxLost(f"{self.sandbox}: the broker has not answered for {_SILENCE:g} s"))
