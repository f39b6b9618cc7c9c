"""A broker in the hands of what runs inside: whatever it sends, the host's session ends in an error, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from sandboxes import channel
from sandboxes.broker.framing import MAX_FRAME, FrameReader, encode
from sandboxes.errors import SandboxError, SandboxFileError, SandboxLost, SandboxProtocolError
from sandboxes.protocol import Session
from sandboxes.selfcheck.framework import Bench, CheckFailed, check, expect, expect_equal

_SOON = 10.0
_BASH = {
    "exit_code": 0,
    "cwd": "/",
    "duration": 0.1,
    "timed_out": False,
    "running": False,
    "truncated_bytes": 0,
    "restarted": False,
    "limit_exceeded": "",
}

# What a forger sends for the request with that id, in one or more pieces; then it closes the connection if it ends with None.
_Forger = Callable[[int], Iterable[bytes | None]]


@contextlib.asynccontextmanager
async def _session(bench: Bench, forge: _Forger) -> AsyncIterator[Session]:
    """A session to a broker that answers pings, and everything else as `forge` says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(65536):
                for header, _ in frames.feed(data):
                    for piece in _pong(header) if header["verb"] == "ping" else forge(header["id"]):
                        if piece is None:
                            return
                        writer.write(piece)
                        await writer.drain()

    name = bench.new_name()
    directory = bench.backend.state_dir / name
    directory.mkdir(mode=0o700, parents=True)
    server = await asyncio.start_unix_server(serve, sock=channel.listen(directory))
    try:
        session = await bench.backend.connect(name)
        try:
            yield session
        finally:
            await session.close()
    finally:
        server.close()
        await bench.backend.stop(name)


def _pong(request: dict[str, Any]) -> list[bytes]:
    return [encode({"id": request["id"], "dead_man_seconds": 600})]


def _answer(number: int, payload: bytes = b"", /, **changes: object) -> bytes:
    return encode({"id": number, **_BASH, **changes}, payload)


def _frame(payload: bytes = b"", /, **header: object) -> _Forger:
    return lambda number: [encode({"id": number, **header}, payload)]


async def _expect_end(call: Awaitable[object], what: str, *kinds: type[SandboxError]) -> None:
    """The call raises one of `kinds` within a bound."""
    try:
        async with asyncio.timeout(_SOON):
            result = await call
    except kinds:
        return
    except TimeoutError:
        raise CheckFailed(f"after {what} the call hangs") from None
    except SandboxError as error:
        raise CheckFailed(f"after {what} the call raised {error!r}") from error
    raise CheckFailed(f"after {what} the call returned {result!r:.200}")


@check("bytes that are no frame end the session with an error: garbage, wrong lengths, broken JSON, half a frame")
async def broken_frames(bench: Bench) -> None:
    attacks: dict[str, _Forger] = {
        "garbage": lambda _: [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        "an oversized frame": lambda _: [struct.pack("!II", MAX_FRAME + 1, 10)],
        "the largest length there is": lambda _: [struct.pack("!II", 0xFFFFFFFF, 0xFFFFFFFF)],
        "a header longer than its frame": lambda _: [struct.pack("!II", 8, 100)],
        "a header that is no JSON": lambda _: [struct.pack("!II", 7, 3) + b"{{{"],
        "a header that is no UTF-8": lambda _: [struct.pack("!II", 7, 3) + b"\xff\xfe\xfd"],
        "deeply nested JSON": lambda _: [struct.pack("!II", 100_004, 100_000) + b"[" * 100_000],
        "a header that is no object": lambda _: [struct.pack("!II", 6, 2) + b"[]"],
        "half a frame and the end": lambda number: [_answer(number)[:20], None],
        "the end": lambda _: [None],
    }
    for what, forge in attacks.items():
        async with _session(bench, forge) as session:
            await _expect_end(session.bash("true", timeout=60), what, SandboxProtocolError, SandboxLost)
            await _expect_end(session.ping(), what, SandboxProtocolError, SandboxLost)


@check("answers that nobody asked for end the session: wrong ids, no ids, more than an answer, an answer twice")
async def unasked_answers(bench: Bench) -> None:
    attacks: dict[str, _Forger] = {
        "an answer to another request": lambda number: [_answer(number + 1000)],
        "a negative id": lambda number: [_answer(-number)],
        "an id that is a text": lambda number: [encode({**_BASH, "id": str(number)})],
        "an id that is a list": lambda number: [encode({**_BASH, "id": [number]})],
        "an id that is true": lambda _: [encode({**_BASH, "id": True})],
        "no id": lambda _: [encode(_BASH)],
        "more than an answer": _frame(b"x", more=True),
        "output for another request": lambda number: [encode({"id": number + 1000, "more": True}, b"x")],
    }
    for what, forge in attacks.items():
        async with _session(bench, forge) as session:
            await _expect_end(session.bash("true", timeout=60), what, SandboxProtocolError)
    async with _session(bench, lambda number: [_answer(number), _answer(number)]) as session:
        with contextlib.suppress(SandboxProtocolError):  # the second may be read together with the first
            await session.bash("true", timeout=60)
        await _expect_end(session.until_lost(), "an answer sent twice", SandboxProtocolError)


@check("an answer with missing or wrong fields is an error, not a result")
async def wrong_fields(bench: Bench) -> None:
    attacks: dict[str, _Forger] = {
        f"an answer without {key}": _frame(**{name: value for name, value in _BASH.items() if name != key}) for key in _BASH
    }
    for key, value in (
        ("exit_code", "0"),
        ("exit_code", -1),
        ("exit_code", 1 << 70),
        ("cwd", 7),
        ("duration", "1"),
        ("duration", float("nan")),
        ("duration", float("inf")),
        ("duration", -1),
        ("timed_out", "no"),
        ("truncated_bytes", 1.5),
        ("limit_exceeded", None),
    ):
        attacks[f"{key} = {value!r}"] = _frame(**{**_BASH, key: value})
    failures: list[object] = [7, [], {}, {"kind": 3}, {"kind": "file"}, {"kind": ["limit"], "message": {}}]
    for failure in failures:
        attacks[f"the failure {failure!r}"] = _frame(failure=failure)
    for what, forge in attacks.items():
        async with _session(bench, forge) as session:
            await _expect_end(session.bash("true", timeout=60), what, SandboxProtocolError, SandboxFileError)


@check("files are no longer than was asked for, come in no more pieces than were asked for, and listings are listings")
async def wrong_files(bench: Bench) -> None:
    async with _session(bench, _frame(bytes(1000))) as session:
        await _expect_end(session.read_file("x", max_bytes=10), "a file that is too long", SandboxProtocolError)
    async with _session(bench, lambda number: [encode({"id": number, "more": True}, bytes(64))] * 1000) as session:
        await _expect_end(_download(session), "a flood of pieces", SandboxProtocolError)
    async with _session(bench, _frame(bytes(1 << 23), more=True)) as session:
        await _expect_end(_download(session), "a piece that is too large", SandboxProtocolError)
    for listing in (b"file 1 /x", b"\0", b"file x /x\0", b"demon 1 /x\0", b"file -1 /x\0", b"file " + b"9" * 5000 + b" /x\0"):
        async with _session(bench, _frame(listing)) as session:
            await _expect_end(session.list_files("/"), f"the listing {listing[:20]!r}", SandboxProtocolError)


async def _download(session: Session) -> list[bytes]:
    return [piece async for piece in session.download("x")]


@check("an answer in single bytes, over many others, still is one")
async def slow_answers(bench: Bench) -> None:
    async with _session(bench, lambda number: [bytes([byte]) for byte in _answer(number, b"out")]) as session:
        results = await asyncio.gather(*(session.bash("true", timeout=60) for _ in range(5)))
        expect_equal([result.output for result in results], ["out"] * 5, "the outputs")


@check("a broker that never answers holds nobody who stops waiting, and keeps nothing from being closed")
async def silence(bench: Bench) -> None:
    async with _session(bench, lambda _: []) as session:
        for call in (
            session.bash("true", timeout=60),
            session.python("1", timeout=60),
            session.read_file("x"),
            session.list_files("/"),
        ):
            try:
                async with asyncio.timeout(0.2):
                    await call
            except TimeoutError:
                continue
            raise CheckFailed("a call returned")
        waiting = asyncio.create_task(session.bash("true", timeout=60))
        expect(await session.ping() < _SOON, "the session does not work any more")
        async with asyncio.timeout(_SOON):
            await session.close()
        await _expect_end(waiting, "closing", SandboxLost)


@check("the host's session survives what a broker sends a thousand times")
async def many_failures(bench: Bench) -> None:
    failure = {"kind": "file", "reason": "other", "message": "x" * 10_000}
    async with _session(bench, _frame(failure=failure)) as session:
        for _ in range(1000):
            with contextlib.suppress(SandboxFileError):
                await session.read_file("x")
        expect(await session.ping() < _SOON, "the session does not work any more")
