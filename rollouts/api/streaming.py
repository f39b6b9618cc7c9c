"""Answers whose body comes later or bit by bit.

The view has ended by then. No database connection waits with the client, and of threads only the idle one (some 50 KiB) that
Django keeps for each request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import connection
from django.http import StreamingHttpResponse
from rest_framework.renderers import JSONRenderer

P = ParamSpec("P")
R = TypeVar("R")

HEARTBEAT_SECONDS = 15.0
EVENT_STREAM = "text/event-stream"
HEARTBEAT = ": still here\n\n"


class EventStreamRenderer(JSONRenderer):
    """Lets clients ask for an event stream by `Accept`. What it renders are the problems of requests that get none."""

    media_type = EVENT_STREAM
    format = "event-stream"


class ServerSentEvent(NamedTuple):
    """One message. `id` is what `Last-Event-ID` says to go on behind it."""

    name: str
    data: Mapping[str, Any]
    id: str

    def encoded(self) -> str:
        data = JSONRenderer().render(self.data).decode()  # one line: JSON has no line breaks outside strings
        return f"event: {self.name}\nid: {self.id}\ndata: {data}\n\n"


def event_stream(messages: AsyncIterator[ServerSentEvent | None]) -> StreamingHttpResponse:
    """An answer of messages as they come; None becomes a heartbeat."""

    async def encoded() -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        async for message in messages:
            yield HEARTBEAT if message is None else message.encoded()

    return later(encoded(), EVENT_STREAM)


def later(body: AsyncIterator[str | bytes], content_type: str) -> StreamingHttpResponse:
    """An answer whose head is sent at once and whose body when there is one."""
    connection.close()  # this thread may not be needed again until the body has ended
    return StreamingHttpResponse(body, content_type=content_type, headers={"X-Accel-Buffering": "no"})


async def in_thread(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Read the database in one of the few threads that all streams share, and give the connection back."""

    def unit_of_work() -> R:
        try:
            return function(*args, **kwargs)
        finally:
            connection.close()

    return await sync_to_async(unit_of_work, thread_sensitive=False)()
