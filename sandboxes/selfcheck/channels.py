"""Connections: several, again after a restart, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

from sandboxes import channel
from sandboxes.broker.framing import FrameReader, encode
from sandboxes.errors import SandboxError, SandboxLost, SandboxProtocolError
from sandboxes.protocol import SandboxSpec
from sandboxes.selfcheck.framework import Bench, CheckFailed, check, expect, expect_equal, expect_output


def _raw(bench: Bench, name: str) -> socket.socket:
    peer = channel.connect(bench.backend.state_dir / name)
    peer.settimeout(5)
    return peer


def _is_closed(peer: socket.socket) -> bool:
    """Whether the broker ends the connection; a timeout says no."""
    try:
        while peer.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@check("later connections find the shell and the interpreter as earlier ones left them")
async def share_state(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        await session.bash("x=5; cd /tmp", timeout=5)
        await session.python("y = 6", timeout=10)
        await session.close()
        other = await bench.backend.connect(name)
        expect_output(await other.bash("echo $x; pwd", timeout=5), "5\n/tmp\n")
        expect_equal((await other.python("y", timeout=10)).value, "6", "a name from an earlier connection")
        await other.close()


@check("many requests are in flight on several connections, and each gets its own answer")
async def multiplex(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        others = [await bench.backend.connect(name) for _ in range(10)]
        slow = asyncio.create_task(session.bash("sleep 0.5; echo slow", timeout=5))
        answers = await asyncio.gather(*(other.python(f"{n}", timeout=10) for n, other in enumerate(others)))
        expect_equal([answer.value for answer in answers], [str(n) for n in range(10)], "the answers")
        expect(not slow.done(), "quick requests waited for a slow one")
        expect_output(await slow, "slow\n")
        for other in others:
            await other.close()


@check("garbage, oversized frames, broken headers and half frames end their own connection and no other")
async def survive_garbage(bench: Bench) -> None:
    name = bench.new_name()
    attacks = {
        "garbage": b"GET / HTTP/1.1\r\n\r\n",
        "an oversized frame": struct.pack("!II", 0x7FFFFFFF, 10),
        "a header longer than its frame": struct.pack("!II", 8, 100),
        "a header that is no JSON": struct.pack("!II", 7, 3) + b"{{{",
        "deeply nested JSON": struct.pack("!II", 100_004, 100_000) + b"[" * 100_000,
        "a header that is no object": struct.pack("!II", 6, 2) + b"[]",
        "an id that is no number": encode({"id": "1", "verb": "ping"}),
        "an id that is in use": encode({"id": 1, "verb": "bash", "timeout": 60}, b"sleep 60") * 2,
    }
    async with bench.sandbox(name=name) as session:
        for what, data in attacks.items():
            with _raw(bench, name) as peer:
                peer.sendall(data)
                expect(await asyncio.to_thread(_is_closed, peer), f"{what} did not end the connection")
            expect(await session.ping() < 5, f"{what} harmed another session")
        with _raw(bench, name) as peer:
            peer.sendall(encode({"id": 1, "verb": "ping"})[:7])
        expect_output(await session.bash("echo back", timeout=5), "back\n")


@check("impossible requests are refused one by one")
async def refuse_bad_requests(bench: Bench) -> None:
    name = bench.new_name()
    requests: list[dict[str, object]] = [
        {"verb": "reboot"},
        {"verb": ["bash"]},
        {},
        {"verb": "bash"},
        {"verb": "bash", "timeout": -1},
        {"verb": "bash", "timeout": "soon"},
        {"verb": "bash", "timeout": 1e300},
        {"verb": "read", "path": 3, "max_bytes": 1},
        {"verb": "read", "path": "/etc/passwd", "max_bytes": 10**12},
        {"verb": "list", "path": "a\0b"},
    ]
    async with bench.sandbox(name=name) as session:
        with _raw(bench, name) as peer:
            frames = FrameReader()
            for number, request in enumerate(requests):
                peer.sendall(encode({"id": number, **request}))
                answers = list(frames.feed(await asyncio.to_thread(peer.recv, 65536)))
                kinds = [answer.get("failure", {}).get("kind") for answer, _ in answers]
                expect_equal(kinds, ["invalid"], f"the answer to {json.dumps(request)}")
            peer.sendall(encode({"id": 999, "verb": "cancel"}) + encode({"id": 1000, "verb": "ping"}))
            answers = list(frames.feed(await asyncio.to_thread(peer.recv, 65536)))
            expect_equal([answer["id"] for answer, _ in answers], [1000], "the answer after an unknown cancel")
        try:
            await session.bash("echo a\0b", timeout=5)
        except SandboxProtocolError:
            return
        raise CheckFailed("a command with a NUL character was accepted")


@check("a peer that never reads its answers harms no other session")
async def survive_deaf_peers(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        await session.write_file("big", b"x" * 10_000_000)
        with _raw(bench, name) as peer:
            for number in range(30):
                peer.sendall(encode({"id": number, "verb": "read", "path": "big", "max_bytes": 10_000_000}))
            expect(await session.ping() < 5, "the broker waits for the deaf peer")
            expect_output(await session.bash("echo back", timeout=5), "back\n")


@check("a sandbox nobody is connected to ends itself after its dead-man time, one in use does not")
async def end_by_dead_man(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(SandboxSpec(dead_man_seconds=0.5), name=name) as session:
        await asyncio.sleep(1)
        expect(await session.ping() < 5, "a connected sandbox ended")
        await session.close()
        for _ in range(100):
            try:
                other = await bench.backend.connect(name)
                await other.close()
            except SandboxLost:
                return
            await asyncio.sleep(0.7)
        raise CheckFailed("the sandbox is still there")


@check("calls to a sandbox that is gone raise SandboxLost, pending and new ones")
async def report_loss(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        pending = asyncio.create_task(session.bash("sleep 60", timeout=60))
        await session.ping()
        await bench.backend.stop(name)
        for call in (pending, asyncio.ensure_future(session.ping()), asyncio.ensure_future(bench.backend.connect(name))):
            try:
                await call
            except SandboxLost:
                continue
            except SandboxError as error:
                raise CheckFailed(f"a call raised {error!r}") from error
            raise CheckFailed("a call succeeded")
