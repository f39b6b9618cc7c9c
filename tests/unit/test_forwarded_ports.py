"""Forwarded ports, with the broker as a plain process: streams over its channel in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes import channel
from sandboxes.broker.framing import MAX_STREAMS, STREAM_WINDOW, FrameReader, encode
from sandboxes.errors import SandboxLost, SandboxProtocolError
from sandboxes.network.relay import relay_to, relay_to_socket
from sandboxes.session import BrokerSession

SIZE = 8 * 1024 * 1024

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def inside(port: int) -> Streams:
    """The broker has no network of its own here, so this is a connection from "inside"."""
    return await asyncio.open_connection("127.0.0.1", port)


async def end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def send_and_read_all(port: int, data: bytes) -> bytes:
    reader, writer = await inside(port)

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    try:
        return await reader.read()
    finally:
        await asyncio.gather(sending, return_exceptions=True)
        await end(writer)


async def test_connections_reach_the_host_and_end_with_what_serves_them(session: BrokerSession) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"you said " + await reader.readline())

    port = await session.forward(serve)
    reader, writer = await inside(port)
    writer.write(b"hello\n")
    assert await reader.read() == b"you said hello\n"
    await end(writer)


async def test_large_data_goes_both_ways_unchanged(session: BrokerSession) -> None:
    port = await session.forward(echo)
    data = hashlib.shake_128(b"seed").digest(SIZE)
    assert hashlib.sha256(await send_and_read_all(port, data)).digest() == hashlib.sha256(data).digest()


async def test_each_side_may_end_its_half_first(session: BrokerSession) -> None:
    got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all there is")
        writer.write_eof()
        got.set_result(await reader.read())

    reader, writer = await inside(await session.forward(serve))
    assert await reader.read() == b"all there is"
    writer.write(b"an answer to that")
    writer.write_eof()
    assert await got == b"an answer to that"
    await end(writer)


async def test_many_streams_of_several_ports_at_once(session: BrokerSession) -> None:
    ports = [await session.forward(echo) for _ in range(3)]
    answers = await asyncio.gather(*(send_and_read_all(port, b"%d" % n * 50_000) for port in ports for n in range(20)))
    assert answers == [b"%d" % n * 50_000 for _ in ports for n in range(20)]


async def test_more_connections_than_streams_wait_for_their_turn(session: BrokerSession) -> None:
    port = await session.forward(echo)
    connections = [await inside(port) for _ in range(MAX_STREAMS + 5)]
    for n, (_, writer) in enumerate(connections):
        writer.write(b"%03d" % n)
    for n, (reader, writer) in enumerate(connections):
        assert await reader.readexactly(3) == b"%03d" % n
        await end(writer)


async def test_a_stream_nobody_reads_holds_up_nothing_else(session: BrokerSession) -> None:
    release = asyncio.Event()
    served = 0

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        await release.wait()

    stuck_port = await session.forward(ignore)
    port = await session.forward(echo)
    stuck = []
    for _ in range(5):
        _, writer = await inside(stuck_port)
        writer.write(b"x" * SIZE)
        stuck.append(writer)
    assert await send_and_read_all(port, b"y" * 1_000_000) == b"y" * 1_000_000
    assert (await session.bash("echo here", timeout=5)).output == "here\n"
    assert served == 5
    release.set()
    for writer in stuck:
        await end(writer)


async def test_a_client_that_never_reads_holds_up_its_own_stream_only(session: BrokerSession) -> None:
    full = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 65536)
            try:
                async with asyncio.timeout(0.5):
                    await writer.drain()
            except TimeoutError:
                full.set()
                await reader.read()

    _, writer = await inside(await session.forward(flood))
    await full.wait()
    assert (await session.bash("echo here", timeout=5)).output == "here\n"
    assert await send_and_read_all(await session.forward(echo), b"y" * 1_000_000) == b"y" * 1_000_000
    writer.transport.abort()


async def test_what_serves_a_connection_is_cancelled_when_it_breaks(session: BrokerSession) -> None:
    serving, cancelled = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    _, writer = await inside(await session.forward(serve))
    await serving.wait()
    linger = struct.pack("ii", 1, 0)  # close with a reset
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
    async with asyncio.timeout(10):
        await cancelled.wait()


async def test_a_server_that_fails_resets_the_connection(session: BrokerSession, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise ValueError("broken")

    reader, writer = await inside(await session.forward(serve))
    with pytest.raises(ConnectionResetError):
        await reader.read()
    await end(writer)
    assert "ValueError('broken')" in caplog.text
    assert (await session.bash("echo here", timeout=5)).output == "here\n"


async def test_taken_and_impossible_ports_are_refused_by_name(session: BrokerSession) -> None:
    port = await session.forward(echo)
    for refused in (port, 70_000, -1):
        with pytest.raises(SandboxProtocolError, match=r"port \d+ cannot be forwarded: Address already|port is a number"):
            await session.forward(echo, port=refused)
    assert await send_and_read_all(port, b"still") == b"still"


async def test_the_port_ends_with_the_session_and_can_be_had_again(session: BrokerSession, tmp_path: Path) -> None:
    port = await session.forward(echo)
    reader, writer = await inside(port)
    writer.write(b"x")
    await reader.readexactly(1)
    await session.close()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    await end(writer)
    later = await BrokerSession.open("test", channel.connect(tmp_path))
    assert await later.forward(echo, port=port) == port
    await later.close()


async def test_serving_ends_with_the_sandbox(session: BrokerSession, broker: subprocess.Popen[bytes]) -> None:
    serving, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.set()
        try:
            await reader.read()
        finally:
            ended.set()

    port = await session.forward(serve)
    _, writer = await inside(port)
    await serving.wait()
    broker.kill()
    async with asyncio.timeout(10):
        await ended.wait()
    with pytest.raises(SandboxLost):
        await session.forward(serve)
    await end(writer)


async def echo_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await echo(reader, writer)
    writer.close()


@pytest.fixture
async def service() -> AsyncIterator[int]:
    async with await asyncio.start_server(echo_and_close, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_relay_reaches_a_service_of_the_host(session: BrokerSession, service: int) -> None:
    port = await session.forward(relay_to("127.0.0.1", service))
    assert await send_and_read_all(port, b"x" * 1_000_000) == b"x" * 1_000_000


async def test_relay_reaches_a_unix_socket_of_the_host(session: BrokerSession, tmp_path: Path) -> None:
    async with await asyncio.start_unix_server(echo_and_close, tmp_path / "service.sock"):
        port = await session.forward(relay_to_socket(tmp_path / "service.sock"))
        assert await send_and_read_all(port, b"hello") == b"hello"


async def test_relay_to_nothing_resets(session: BrokerSession, tmp_path: Path) -> None:
    port = await session.forward(relay_to_socket(tmp_path / "none"))
    with pytest.raises(ConnectionResetError):
        await send_and_read_all(port, b"hello")


Frame = tuple[dict[str, object], bytes]


@contextlib.asynccontextmanager
async def forwarding_broker() -> AsyncIterator[tuple[BrokerSession, Callable[..., Awaitable[None]]]]:
    """A session whose broker was asked for a forwarded port, and how it sends frames about that."""
    ours, theirs = socket.socketpair()
    with theirs:
        for peer in (ours, theirs):
            peer.setblocking(False)
        loop = asyncio.get_running_loop()
        session = await BrokerSession.open("test", ours)
        forwarding = asyncio.create_task(session.forward(never_read))
        frames, number = FrameReader(), None
        while number is None:  # the session pings, too
            for header, _ in frames.feed(await loop.sock_recv(theirs, 4096)):
                number = header["id"] if header["verb"] == "forward" else number

        async def send(*frames: Frame) -> None:
            data = b"".join(encode({"id": number, "more": True, **header}, payload) for header, payload in frames)
            await loop.sock_sendall(theirs, data)

        yield session, send
        await session.close()
        await asyncio.gather(forwarding, return_exceptions=True)


async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


OPEN: Frame = ({"stream": 1, "open": True}, b"")


@pytest.mark.parametrize(
    "frames",
    [
        [({"stream": 1}, b"x")],
        [({"stream": "1"}, b"x")],
        [({"stream": 0, "eof": True}, b"")],
        [({}, b"x")],
        [OPEN, OPEN],
        [({"stream": n, "open": True}, b"") for n in range(1, MAX_STREAMS + 2)],
        [OPEN, ({"stream": 1}, bytes(STREAM_WINDOW + 1))],
        [OPEN, ({"stream": 1}, bytes(STREAM_WINDOW)), ({"stream": 1}, bytes(STREAM_WINDOW)), ({"stream": 1}, b"x")],
        [OPEN, ({"stream": 1, "eof": True}, b""), ({"stream": 1}, b"x")],
        [OPEN, ({"stream": 1, "credit": 1}, b"")],
        [OPEN, ({"stream": 1, "credit": -5}, b"")],
        [OPEN, ({"stream": 1, "credit": 1e9}, b"")],
    ],
)
async def test_a_broker_that_sends_nonsense_loses_its_session(frames: list[Frame]) -> None:
    async with forwarding_broker() as (session, send):
        await send(({"port": 4000}, b""), *frames)
        with pytest.raises(SandboxProtocolError, match="nonsense"):
            async with asyncio.timeout(10):
                await session.until_lost()


@pytest.mark.parametrize("port", [0, 70_000, "80", None])
async def test_a_broker_that_names_an_impossible_port_loses_its_session(port: object) -> None:
    async with forwarding_broker() as (session, send):
        await send(({"port": port}, b""))
        with pytest.raises(SandboxProtocolError, match="nonsense"):
            async with asyncio.timeout(10):
                await session.until_lost()
