"""One path of the gateway: who asks, what, and until when; then the answer, whole or in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import orjson
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollouts.gateway.dialects.base import CountingDialect, Dialect, Part
from rollouts.gateway.directory import SessionDirectory
from rollouts.gateway.errors import CallRefused, Kind, SessionClosed, SessionMoved
from rollouts.gateway.fields import Fields
from rollouts.gateway.requests import ModelRequest
from rollouts.gateway.session import AgentSession

logger = structlog.get_logger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class Limits:
    """Bounds on one request, and on those of a session that are under way."""

    body_bytes: int = 16 * 1024 * 1024
    session_bytes: int = 32 * 1024 * 1024  # of all bodies that are not answered yet: in memory they are many times that
    body_seconds: float = 60.0  # for all of the body to arrive
    keep_alive_seconds: float = 15.0  # a stream is never silent for longer


class Endpoint:
    """POST to one dialect. An ASGI application, because it must see its client go away."""

    def __init__(self, dialect: Dialect, directory: SessionDirectory, limits: Limits) -> None:
        self._dialect = dialect
        self._directory = directory
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = _Answer(send, self._limits.keep_alive_seconds)
        try:
            await self._serve(request, answer)
        except ClientDisconnect:
            return
        except Exception as exc:
            await answer.refuse(self._dialect, as_refusal(exc))

    async def _serve(self, request: Request, answer: _Answer) -> None:
        session = await find_session(self._directory, request)
        with _Load(session) as load:
            asked = self._read(await self._body(request, load), request, session)
            work = self._stream(session, asked, answer) if asked.stream else self._whole(session, asked, answer)
            await _while_connected(request.receive, work)

    def _read(self, body: Fields, request: Request, session: AgentSession) -> ModelRequest:
        return self._dialect.read(body, model=request.path_params.get("model", ""), remembered=session.remembered)

    async def _body(self, request: Request, load: _Load) -> Fields:
        parts = []
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    parts.append(part)
                    load.add(len(part))
                    if load.size > self._limits.body_bytes:
                        raise CallRefused(Kind.TOO_LARGE, f"the body is larger than {self._limits.body_bytes} bytes")
                    if load.of_session > self._limits.session_bytes:
                        message = (
                            f"this session's requests under way are larger than {self._limits.session_bytes} bytes together"
                        )
                        raise CallRefused(Kind.TOO_MANY, message, retry_after=1)
        except TimeoutError as exc:
            raise CallRefused(Kind.TOO_SLOW, "the body did not arrive in time") from exc
        return Fields.parse(b"".join(parts))

    async def _whole(self, session: AgentSession, asked: ModelRequest, answer: _Answer) -> None:
        if asked.n == 1:
            replies = [await session.reply(asked)]
        else:
            replies = await _together([session.reply(asked) for _ in range(asked.n)])
        await answer.whole(self._dialect.answer(asked, replies))

    async def _stream(self, session: AgentSession, asked: ModelRequest, answer: _Answer) -> None:
        async with answer.kept_alive(), contextlib.aclosing(_parts(session, asked)) as parts:
            async for chunk in self._dialect.events(asked, parts):
                await answer.piece(chunk)
        await answer.end()


class CountEndpoint(Endpoint):
    """POST to ask how long a prompt is."""

    def __init__(self, dialect: CountingDialect, directory: SessionDirectory, limits: Limits) -> None:
        super().__init__(dialect, directory, limits)
        self._counting = dialect

    async def _serve(self, request: Request, answer: _Answer) -> None:
        session = await find_session(self._directory, request)
        with _Load(session) as load:
            body = await self._body(request, load)
            asked = self._counting.read_to_count(body, model=request.path_params.get("model", ""))
            await answer.whole(self._counting.counted(await session.count_tokens(asked)))


class ModelsEndpoint(Endpoint):
    """GET the one model that a session has, as `describe` writes it."""

    def __init__(
        self, dialect: Dialect, directory: SessionDirectory, limits: Limits, describe: Callable[[str], Mapping[str, Any]]
    ) -> None:
        super().__init__(dialect, directory, limits)
        self._describe = describe

    async def _serve(self, request: Request, answer: _Answer) -> None:
        session = await find_session(self._directory, request)
        await answer.whole(self._describe(session.model))


class _Load:
    """The size of a body, which counts among those of its session for as long as the request is under way."""

    def __init__(self, session: AgentSession) -> None:
        self.size = 0
        self._session = session

    @property
    def of_session(self) -> int:
        return self._session.bytes_under_way

    def add(self, size: int) -> None:
        self.size += size
        self._session.bytes_under_way += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._session.bytes_under_way -= self.size


class _Answer:
    """What is sent back. A stream begins with its first piece, so that what fails before has a status of its own."""

    def __init__(self, send: Send, keep_alive: float) -> None:
        self._send = send
        self._keep_alive = keep_alive
        self._begun = False
        self._last = time.monotonic()
        self._sending = asyncio.Lock()

    async def whole(self, body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        response = Response(orjson.dumps(body), status, headers, media_type="application/json")
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": response.body})

    async def piece(self, data: bytes) -> None:
        async with self._sending:
            if not self._begun:
                self._begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            self._last = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, dialect: Dialect, error: CallRefused) -> None:
        if self._begun:
            await self.piece(dialect.error_event(error))
            await self.end()
            return
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        await self.whole(dialect.error(error), error.kind.value, headers)

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """A comment whenever nothing was sent for a while: proxies and agents give up on silent connections."""
        task = asyncio.create_task(self._comment())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _comment(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._last + self._keep_alive - time.monotonic()))
            if time.monotonic() >= self._last + self._keep_alive:
                await self.piece(b": still working\n\n")


async def find_session(directory: SessionDirectory, request: Request) -> AgentSession:
    """The session of the key that came with a request, wherever its API puts it."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    key = (
        key or request.headers.get("x-api-key") or request.headers.get("x-goog-api-key") or request.query_params.get("key", "")
    )
    session = await directory.find(key) if key else None
    if session is None:
        unknown = "no open session has this key, which is the session's own and not a project's API key"
        raise CallRefused(Kind.UNAUTHENTICATED, unknown if key else "a key is required")
    return session


def as_refusal(exc: Exception) -> CallRefused:
    """What to answer for whatever came up."""
    if isinstance(exc, CallRefused):
        return exc
    if isinstance(exc, SessionMoved):
        return CallRefused(Kind.NO_SERVER, exc.reason, retry_after=1)
    if isinstance(exc, SessionClosed):
        return CallRefused(Kind.CLOSED, exc.reason)
    logger.error("a call of an agent failed", exc_info=exc)
    return CallRefused(Kind.INTERNAL, "the gateway could not serve this call")


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work until its client has gone: nobody would read the answer, and the model should not go on with it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        await task
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _together(works: list[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _parts(session: AgentSession, asked: ModelRequest) -> AsyncGenerator[Part, None]:
    """The events of all replies, as they come."""
    if asked.n == 1:
        async with contextlib.aclosing(session.stream(asked)) as events:
            async for event in events:
                yield Part(0, event)
        return
    queue: asyncio.Queue[Part | None] = asyncio.Queue()

    async def follow(choice: int) -> None:
        try:
            async for event in session.stream(asked):
                queue.put_nowait(Part(choice, event))
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(follow(choice)) for choice in range(asked.n)]
    try:
        for _ in tasks:
            while (part := await queue.get()) is not None:
                yield part
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
