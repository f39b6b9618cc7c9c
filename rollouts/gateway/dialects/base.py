"""What an API that agents speak consists of here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import orjson

from rollouts.gateway.errors import CallRefused
from rollouts.gateway.fields import Fields
from rollouts.gateway.replies import Event, Reply
from rollouts.gateway.requests import ModelRequest
from rollouts.llm.types import ChatMessage


class Part(NamedTuple):
    """An event of one of the replies of a request."""

    choice: int
    event: Event


Remembered = Mapping[str, Sequence[ChatMessage]]
"""Conversations that a request may name, by the id of the request that ended them."""


class Dialect(Protocol):
    """One API."""

    def read(self, body: Fields, *, model: str, remembered: Remembered) -> ModelRequest:
        """`model` is the one that the path names, if it does. Raises `CallRefused`."""
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


class CountingDialect(Dialect, Protocol):
    """One that can be asked how long a prompt is."""

    def read_to_count(self, body: Fields, *, model: str) -> ModelRequest:
        """Raises `CallRefused`."""
        ...

    def counted(self, tokens: int) -> dict[str, Any]:
        """The body of a 200."""
        ...


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
