"""What a call of an agent can be answered with instead of a reply. Each dialect writes them in its own shape."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.Enum):
    """What is wrong, with the HTTP status it is answered with."""

    INVALID = 400
    UNAUTHENTICATED = 401
    CLOSED = 403
    NOT_FOUND = 404
    WRONG_METHOD = 405
    TOO_SLOW = 408
    TOO_LARGE = 413
    TOO_MANY = 429
    INTERNAL = 500
    MODEL_FAILED = 502
    NO_SERVER = 503


class Overflow(NamedTuple):
    """A prompt of so many tokens, for a model whose context holds `limit`."""

    prompt: int
    limit: int


class CallRefused(Exception):
    """A call that gets no reply. The message is for the agent's developer.

    `field` names what in the request is wrong, `overflow` tells by how much the prompt is too long, and `retry_after`
    (seconds) when to come again.
    """

    def __init__(
        self, kind: Kind, message: str, *, field: str = "", overflow: Overflow | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field
        self.overflow = overflow
        self.retry_after = retry_after


def refuse(field: str, message: str) -> CallRefused:
    """The request is wrong in `field`."""
    return CallRefused(Kind.INVALID, f"{field}: {message}", field=field)


class SessionClosed(Exception):
    """The session has ended; `reason` is a sentence for the agent, answered with a 403."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SessionMoved(SessionClosed):
    """Another process serves the session from now on: answered with a 503, since the same call will be served there."""
