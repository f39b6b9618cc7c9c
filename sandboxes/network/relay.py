"""Carrying the connections of a forwarded port to a service of the host. No Django."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandboxes.protocol import Serve

_CHUNK = 64 * 1024


def relay_to(host: str, port: int) -> Serve:
    """For `Session.forward`: what connects to the port inside talks to `host`:`port` of the host, whatever the policy is."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, *await asyncio.open_connection(host, port))

    return serve


def relay_to_socket(path: Path) -> Serve:
    """As `relay_to`, to a Unix socket."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, *await asyncio.open_unix_connection(path))

    return serve


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
    *,
    idle_timeout: float | None = None,
) -> None:
    """Copy both ways, each until its own end, and end the other connection.

    Raises OSError when one of them breaks; TimeoutError, which is one, when nothing moved for `idle_timeout` seconds.
    """
    loop = asyncio.get_running_loop()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            if idle_timeout is not None:
                idle.reschedule(loop.time() + idle_timeout)
            target.write(data)
            await target.drain()
        target.write_eof()

    try:
        async with asyncio.timeout(idle_timeout) as idle, asyncio.TaskGroup() as copies:
            copies.create_task(copy(reader, other_writer))
            copies.create_task(copy(other_reader, writer))
    except BaseException as error:
        other_writer.transport.abort()
        if isinstance(error, ExceptionGroup):
            raise error.exceptions[0] from None
        raise
    other_writer.close()
