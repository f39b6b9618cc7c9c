"""What can go wrong between us and a model, named after the boundary it happened at."""

from __future__ import annotations


class ModelError(Exception):
    """The model server could not do its part: unreachable, refusing, overloaded or answering nonsense (infrastructure).

    `retryable` says whether the same call may work later or on another server; `status` is the HTTP status, if there was one.
    """

    def __init__(self, message: str, *, retryable: bool, status: int | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.status = status


class ContextOverflow(Exception):
    """The prompt leaves no room for a single token. It ends the policy's episode; it is nobody's failure."""
