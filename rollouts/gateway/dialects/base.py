"""What an API that agents speak consists of here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import orjson

from rollouts.gateway.errors import CallRefused
from rollouts.gateway.fields import Fields
from rollouts.gateway.replies import Event, Reply
from rollouts.gateway.requests import ModelRequest


class Part(NamedTuple):
    """An event of one of the replies of a request."""

    choice: int
    event: Event


class Dialect(Protocol):
    """One API. `path` holds what of the request is in its path: a model's name."""

    name: str

    def read(self, body: Fields, path: Mapping[str, str]) -> ModelRequest:
        """Raises `CallRefused`."""
        ...

    def answer(self, request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
        """The body of a 200."""
        ...

    def events(self, request: ModelRequest, parts: AsyncIterator[Part]) -> AsyncIterator[bytes]:
        """The same as server-sent events."""
        ...

    def error(self, error: CallRefused) -> dict[str, Any]:
        """The body of a refusal."""
        ...

    def error_event(self, error: CallRefused) -> bytes:
        """A refusal after the answer began."""
        ...


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
