"""The host's view of one sandbox, over a connection to its broker. No Django."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any, NoReturn

from sandboxes import answers, transfers
from sandboxes.broker.framing import MAX_PAYLOAD
from sandboxes.errors import SandboxFileError, SandboxLost, SandboxProtocolError
from sandboxes.network.streams import Streams
from sandboxes.protocol import CommandResult, FileEntry, Output, PythonResult, Serve
from sandboxes.wire import Answer, OnMore, Wire


class BrokerSession:
    """Implements `sandboxes.protocol.Session`; made by `open`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._forwards: list[Streams] = []

    @classmethod
    async def open(cls, sandbox: str, peer: socket.socket) -> BrokerSession:
        """Take over `peer`, a connected non-blocking socket to the broker of `sandbox` (a name, for messages only)."""
        return cls(await Wire.open(sandbox, peer))

    async def ping(self) -> float:
        """Seconds until the broker answered."""
        started = time.perf_counter()
        await self._request("ping")
        return time.perf_counter() - started

    async def bash(
        self,
        command: str,
        *,
        timeout: float,
        quiet_timeout: float | None = None,
        on_output: Output | None = None,
        leaves_nothing: bool = False,
    ) -> CommandResult:
        code = command.encode("utf-8", "replace")
        limits = {"timeout": timeout, "quiet_timeout": quiet_timeout, "leaves_nothing": leaves_nothing}
        return answers.command_result(*await self._run("bash", code, on_output, **limits))

    async def bash_input(
        self, data: bytes, *, timeout: float, quiet_timeout: float | None = None, on_output: Output | None = None
    ) -> CommandResult:
        return answers.command_result(
            *await self._run("bash_input", data, on_output, timeout=timeout, quiet_timeout=quiet_timeout)
        )

    async def python(self, code: str, *, timeout: float, on_output: Output | None = None) -> PythonResult:
        return answers.python_result(*await self._run("python", code.encode("utf-8", "replace"), on_output, timeout=timeout))

    async def interrupt_python(self) -> None:
        await self._request("interrupt_python")

    async def restart_python(self) -> None:
        await self._request("restart_python")

    async def set_env(self, variables: Mapping[str, str]) -> None:
        """At most 4096 bytes, names and values together. Raises SandboxProtocolError for what is no name or text."""
        await self._request("env", variables=dict(variables))

    async def read_file(self, path: str, *, max_bytes: int = 10 * 1024 * 1024) -> bytes:
        """The whole file. Raises SandboxFileError, also when it has more than `max_bytes`."""
        _, data = await self._request("read", path=path, max_bytes=max_bytes)
        if len(data) > max_bytes:
            raise SandboxProtocolError(f"{self._wire.sandbox}: {len(data)} bytes of a file instead of at most {max_bytes}")
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file, and its parent directories. Raises SandboxFileError."""
        if len(data) > MAX_PAYLOAD:
            raise SandboxFileError("too_large", path, f"{len(data)} bytes are more than one request carries: {path!r}")
        await self._request("write", data, path=path)

    async def list_files(self, path: str) -> list[FileEntry]:
        """The entries of a directory, sorted by path, not recursive. Raises SandboxFileError."""
        _, listing = await self._request("list", path=path)
        return answers.file_entries(listing)

    def download(self, path: str) -> AsyncGenerator[bytes]:
        """Raises SandboxFileError, at the first piece or a later one."""
        return transfers.download(self._wire, path)

    async def upload(self, path: str, pieces: AsyncIterable[bytes]) -> None:
        """Create or replace a file, and its parent directories. Raises SandboxFileError."""
        await transfers.upload(self._wire, path, pieces)

    async def forward(self, serve: Serve, *, port: int = 0) -> int:
        """Raises SandboxProtocolError when the port is taken inside."""
        streams = Streams(self._wire.sandbox, serve, lambda header, payload: call.send_more(header, payload))
        call = self._wire.call("forward", b"", streams.on_frame, port=port)
        either: set[asyncio.Future[Any]] = {call.answer, streams.port}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not streams.port.done():
                await call.result()
                raise SandboxProtocolError(f"{self._wire.sandbox}: a forwarded port was answered without one")
        except BaseException:
            call.cancel()
            streams.break_off()
            raise
        call.answer.add_done_callback(lambda _: streams.break_off())
        self._forwards.append(streams)
        return streams.port.result()

    async def until_lost(self) -> NoReturn:
        await self._wire.until_closed()
        raise self._wire.broken or SandboxLost(f"{self._wire.sandbox}: not connected")

    async def close(self) -> None:
        """End the connection. Pending requests end with SandboxLost, and what they run inside is killed."""
        await self._wire.close()
        for streams in self._forwards:
            await streams.wait_ended()

    async def _request(self, verb: str, payload: bytes = b"", **arguments: object) -> Answer:
        with self._wire.call(verb, payload, None, **arguments) as call:
            return await call.result()

    async def _run(self, verb: str, payload: bytes, on_output: Output | None, **arguments: float | None) -> Answer:
        on_more: OnMore | None = None if on_output is None else (lambda _, data: on_output(data))
        with self._wire.call(verb, payload, on_more, live=on_output is not None, **arguments) as call:
            return await call.result()
