"""What a call of an agent can be answered with instead of a reply. Each dialect writes them in its own shape."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from rollouts.llm.errors import ModelError
from rollouts.llm.route import Overtaken

_ADDRESS = re.compile(
    r"[a-z][a-z0-9+.-]{0,20}://[^\s'\"<>,;]+"  # a URL
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"
    r"|\[[0-9a-f]*:[0-9a-f:.]+\](?::\d+)?",
    re.IGNORECASE,
)


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


def refusal_of(error: ModelError) -> CallRefused:
    """What an agent is told of it. Where servers are is no agent's business, and their words may say that anywhere."""
    if error.status == 400:
        return CallRefused(Kind.INVALID, _ADDRESS.sub("the model server", str(error)), field="messages")
    if error.retryable:
        return CallRefused(Kind.NO_SERVER, "no model server could answer this call; send it again", retry_after=1)
    if isinstance(error, Overtaken):
        return CallRefused(Kind.MODEL_FAILED, f"the model's weights have changed: {error}")
    return CallRefused(Kind.MODEL_FAILED, "the model server failed at this call")


class SessionClosed(Exception):
    """The session has ended; `reason` is a sentence for the agent, answered with a 403."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SessionMoved(SessionClosed):
    """Another process serves the session from now on: answered with a 503, since the same call will be served there."""
