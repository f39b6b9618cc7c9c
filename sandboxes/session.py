"""The host's end of the channel to a sandbox: one connection, many requests in flight. No Django."""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from sandboxes.broker.framing import MAX_PAYLOAD, FrameError, FrameReader, encode
from sandboxes.errors import SandboxError, SandboxFileError, SandboxLost, SandboxProtocolError
from sandboxes.network.streams import Streams
from sandboxes.protocol import CommandResult, FileEntry, PythonResult, Serve

_Answer = tuple[dict[str, Any], bytes]


class BrokerSession(asyncio.Protocol):
    """Implements `sandboxes.protocol.Session` over a connected socket; made by `open`."""

    def __init__(self, sandbox: str) -> None:
        self._sandbox = sandbox
        self._frames = FrameReader()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[_Answer]] = {}
        self._on_more: dict[int, Callable[[dict[str, Any], bytes], None]] = {}  # what takes frames before the answer
        self._forwards: list[Streams] = []
        self._transport: asyncio.Transport | None = None
        self._broken: SandboxError | None = None
        self._closed = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, sandbox: str, peer: socket.socket) -> BrokerSession:
        """Take over `peer`, a connected non-blocking socket to the broker of `sandbox` (a name, for messages only)."""
        session = cls(sandbox)
        await asyncio.get_running_loop().create_unix_connection(lambda: session, sock=peer)
        return session

    # The session protocol.

    async def ping(self) -> float:
        """Seconds until the broker answered."""
        started = time.perf_counter()
        await self._request("ping")
        return time.perf_counter() - started

    async def bash(self, command: str, *, timeout: float) -> CommandResult:
        header, output = await self._request("bash", command.encode("utf-8", "replace"), timeout=timeout)
        timed_out = bool(header["timed_out"])
        return CommandResult(
            exit_code=None if timed_out else int(header["exit_code"]),
            output=output.decode("utf-8", "replace"),
            cwd=str(header["cwd"]),
            duration=float(header["duration"]),
            timed_out=timed_out,
            truncated_bytes=int(header["truncated_bytes"]),
            restarted=bool(header["restarted"]),
        )

    async def python(self, code: str, *, timeout: float) -> PythonResult:
        header, output = await self._request("python", code.encode("utf-8", "replace"), timeout=timeout)
        return PythonResult(
            output=output.decode("utf-8", "replace"),
            value=header["value"],
            error=header["error"],
            duration=float(header["duration"]),
            timed_out=bool(header["timed_out"]),
            truncated_bytes=int(header["truncated_bytes"]),
            restarted=bool(header["restarted"]),
        )

    async def set_env(self, variables: Mapping[str, str]) -> None:
        """At most 4096 bytes, names and values together. Raises SandboxProtocolError for what is no name or text."""
        await self._request("env", variables=dict(variables))

    async def read_file(self, path: str, *, max_bytes: int = 10 * 1024 * 1024) -> bytes:
        """The whole file. Raises SandboxFileError, also when it has more than `max_bytes`."""
        _, data = await self._request("read", path=path, max_bytes=max_bytes)
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file, and its parent directories. Raises SandboxFileError."""
        if len(data) > MAX_PAYLOAD:
            raise SandboxFileError("too_large", path, f"{len(data)} bytes are more than one request carries: {path!r}")
        await self._request("write", data, path=path)

    async def list_files(self, path: str) -> list[FileEntry]:
        """The entries of a directory, sorted by path, not recursive. Raises SandboxFileError."""
        header, _ = await self._request("list", path=path)
        return [FileEntry(path=entry["path"], kind=entry["kind"], size=entry["size"]) for entry in header["entries"]]

    async def forward(self, serve: Serve, *, port: int = 0) -> int:
        """Raises SandboxProtocolError when the port is taken inside."""
        number = next(self._ids)
        streams = Streams(self._sandbox, serve, functools.partial(self._send_more, number))
        answer = self._begin(number, "forward", b"", {"port": port}, streams.on_frame)
        try:
            await asyncio.wait({answer, streams.port}, return_when=asyncio.FIRST_COMPLETED)
            if not streams.port.done():
                header, _ = answer.result()
                raise self._error(header["failure"], {})
        except BaseException:
            self._abandon(number)
            raise
        answer.add_done_callback(lambda ended: ended.exception())  # the session's end, of which everybody else is told
        self._forwards.append(streams)
        return streams.port.result()

    async def until_lost(self) -> NoReturn:
        await asyncio.shield(self._closed)
        raise self._broken or SandboxLost(f"{self._sandbox}: not connected")

    async def close(self) -> None:
        """End the connection. Pending requests end with SandboxLost, and what they run inside is killed."""
        if self._transport is not None:
            self._transport.abort()
            await asyncio.shield(self._closed)
            for streams in self._forwards:
                await streams.wait_ended()

    # The wire.

    async def _request(self, verb: str, payload: bytes = b"", **arguments: Any) -> _Answer:
        number = next(self._ids)
        future = self._begin(number, verb, payload, arguments)
        try:
            header, data = await future
        except asyncio.CancelledError:
            self._abandon(number)
            raise
        finally:
            self._pending.pop(number, None)
        if "failure" in header:
            raise self._error(header["failure"], arguments)
        return header, data

    def _begin(
        self,
        number: int,
        verb: str,
        payload: bytes,
        arguments: Mapping[str, Any],
        on_more: Callable[[dict[str, Any], bytes], None] | None = None,
    ) -> asyncio.Future[_Answer]:
        """`on_more` gets the frames before the answer."""
        if self._transport is None or self._broken is not None:
            raise self._broken or SandboxLost(f"{self._sandbox}: not connected")
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        if on_more is not None:
            self._on_more[number] = on_more
        self._transport.write(encode({"id": number, "verb": verb, **arguments}, payload))
        return future

    def _send_more(self, number: int, header: Mapping[str, Any], payload: bytes) -> None:
        if self._transport is not None and self._broken is None:
            self._transport.write(encode({"id": number, "more": True, **header}, payload))

    def _abandon(self, number: int) -> None:
        """Nobody waits for the answer any more."""
        self._pending.pop(number, None)
        self._on_more.pop(number, None)
        if self._transport is not None and self._broken is None:
            self._transport.write(encode({"id": number, "verb": "cancel"}))

    def _error(self, failure: dict[str, Any], arguments: dict[str, Any]) -> SandboxError:
        message = f"{self._sandbox}: {failure['message']}"
        if failure["kind"] == "file":
            return SandboxFileError(str(failure["reason"]), str(arguments.get("path")), str(failure["message"]))
        if failure["kind"] == "unusable":
            return SandboxLost(message)
        return SandboxProtocolError(message)

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for header, payload in self._frames.feed(data):
                number = header.get("id", 0)
                if header.get("more"):
                    on_more = self._on_more.get(number)
                    if on_more is not None:
                        on_more(header, payload)
                    continue
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_result((header, payload))
        except FrameError as error:
            self._fail(SandboxProtocolError(f"{self._sandbox}: {error}"))
        except SandboxProtocolError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(SandboxLost(f"{self._sandbox}: the broker closed the connection"))
        if not self._closed.done():
            self._closed.set_result(None)

    def _fail(self, error: SandboxError) -> None:
        if self._broken is None:
            self._broken = error
        if self._transport is not None:
            self._transport.abort()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._broken)
        for streams in self._forwards:
            streams.break_off()
