"""Forwarded ports: streams between the inside and the host."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from sandboxes import channel
from sandboxes.broker.framing import STREAM_WINDOW, FrameReader, encode
from sandboxes.errors import SandboxProtocolError
from sandboxes.selfcheck.framework import Bench, CheckFailed, check, expect, expect_equal, value_of

_SIZE = 8 * 1024 * 1024


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@check("large data goes through a forwarded port unchanged, both ways at once, and each half ends by itself")
async def carry_large_data(bench: Bench) -> None:
    received = hashlib.sha256()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send() -> None:
            for number in range(_SIZE // 65536):
                writer.write(bytes([number % 251]) * 65536)
                await writer.drain()

        sending = asyncio.create_task(send())
        while data := await reader.read(65536):
            received.update(data)
        await sending  # what was read ended while we may still be sending
        writer.write(received.hexdigest().encode())

    async with bench.sandbox() as session:
        port = await session.forward(serve)
        digests = await value_of(
            session,
            f"""
import hashlib, socket, threading
peer = socket.create_connection(("127.0.0.1", {port}))
def send():
    for number in range({_SIZE} // 65536):
        peer.sendall(bytes([number % 241]) * 65536)
    peer.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
data = b"".join(iter(lambda: peer.recv(1 << 16), b""))
[hashlib.sha256(data[:{_SIZE}]).hexdigest(), data[{_SIZE}:].decode()]
""",
        )
    sent = hashlib.sha256(b"".join(bytes([number % 251]) * 65536 for number in range(_SIZE // 65536))).hexdigest()
    expect_equal(digests, [sent, received.hexdigest()], "the digests of what arrived inside and outside")
    expected = hashlib.sha256(b"".join(bytes([number % 241]) * 65536 for number in range(_SIZE // 65536))).hexdigest()
    expect_equal(received.hexdigest(), expected, "the digest of what the sandbox sent")


@check("many streams run at once, and one that nobody reads holds up neither them nor other requests")
async def run_many_streams(bench: Bench) -> None:
    release = asyncio.Event()

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()

    async with bench.sandbox() as session:
        ignored, echoing = await session.forward(ignore), await session.forward(_echo)
        answers = await value_of(
            session,
            f"""
import socket
stuck = socket.create_connection(("127.0.0.1", {ignored}))
stuck.setblocking(False)
try:
    while True:
        stuck.send(bytes(65536))
except BlockingIOError:
    pass
peers = [socket.create_connection(("127.0.0.1", {echoing}), 30) for _ in range(30)]
for number, peer in enumerate(peers):
    peer.sendall(b"%08d" % number * 1000)
    peer.shutdown(socket.SHUT_WR)
answers = [b"".join(iter(lambda: peer.recv(65536), b"")) for peer in peers]
[answer == b"%08d" % number * 1000 for number, answer in enumerate(answers)]
""",
        )
        expect_equal(answers, [True] * 30, "whether each stream got its own data back")
        expect(await session.ping() < 5, "another request was held up")
        release.set()


@check("a forwarded port ends with its session, and the next session can have it again")
async def end_with_the_session(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        port = await session.forward(_echo)
        connect = f"import socket\npeer = socket.create_connection(('127.0.0.1', {port}), 30)\npeer.sendall(b'x')"
        expect_equal(await value_of(session, f"{connect}\npeer.recv(1)"), b"x", "the echo")
        try:
            await session.forward(_echo, port=port)
        except SandboxProtocolError as error:
            expect(str(port) in str(error), f"the error does not name the port: {error}")
        else:
            raise CheckFailed("a port was forwarded twice")
        await session.close()
        later = await bench.backend.connect(name)
        open_still = await value_of(
            later,
            f"""
try:
    open_still = peer.recv(1) != b""
except ConnectionError:
    open_still = False
try:
    socket.create_connection(("127.0.0.1", {port}), 3)
    open_still = True
except ConnectionRefusedError:
    pass
open_still
""",
        )
        expect_equal(open_still, False, "whether a connection outlived its session")
        expect_equal(await later.forward(_echo, port=port), port, "the port that the next session got")
        await later.close()


@check("frames for streams that do not exist, data and credit out of turn end their own connection and no other")
async def survive_nonsense_in_streams(bench: Bench) -> None:
    name = bench.new_name()
    attacks: dict[str, list[tuple[dict[str, Any], bytes]]] = {
        "a stream that does not exist": [({"stream": 7}, b"x")],
        "a stream that is no number": [({"stream": []}, b"x")],
        "more data than was asked for": [({"stream": 1}, bytes(STREAM_WINDOW + 1))],
        "data after the end": [({"stream": 1, "eof": True}, b""), ({"stream": 1}, b"x")],
        "credit for nothing": [({"stream": 1, "credit": 1}, b"")],
    }
    async with bench.sandbox(name=name) as session:
        for what, frames in attacks.items():
            reader, writer = await asyncio.open_unix_connection(sock=channel.connect(bench.backend.state_dir / name))
            writer.write(encode({"id": 1, "verb": "forward", "port": 0}))
            answers = FrameReader()
            [(header, _)] = list(answers.feed(await reader.read(4096)))
            await session.python(f"import socket\npeer = socket.create_connection(('127.0.0.1', {header['port']}))", timeout=30)
            list(answers.feed(await reader.read(4096)))  # the stream is open
            for header, payload in frames:
                writer.write(encode({"id": 1, "more": True, **header}, payload))
            try:
                async with asyncio.timeout(10):
                    while await reader.read(4096):
                        pass
            except ConnectionError:
                pass
            except TimeoutError:
                raise CheckFailed(f"{what} did not end the connection") from None
            finally:
                writer.close()
            expect(await session.ping() < 5, f"{what} harmed another session")
