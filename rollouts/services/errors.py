"""What a service says when it refuses. The API turns it into problem+json, forms and commands into their own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class FieldError(NamedTuple):
    """One thing wrong: a JSON pointer into the input (`/groups/0/n`) and a sentence that says how to fix it."""

    pointer: str
    detail: str


class Refused(Exception):
    """The request cannot be carried out and has changed nothing.

    `code` is stable (listed in docs/reference/errors.md); `status` is the HTTP status it maps to.
    """

    code = "invalid"
    status = 422

    def __init__(self, detail: str, errors: Sequence[FieldError] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = list(errors)

    @classmethod
    def field(cls, pointer: str, detail: str) -> Refused:
        """A refusal for one field."""
        return cls(detail, [FieldError(pointer, detail)])


class Conflict(Refused):
    """The name or key is taken, or the thing is in a state that does not allow this."""

    code = "conflict"
    status = 409


class Unavailable(Refused):
    """Something this needs does not answer now (an LLM server at registration)."""

    code = "unavailable"
    status = 503


class LimitReached(NamedTuple):
    """Which limit refuses a submission: its owner (`project` or `run`), its value, what is used of it, rollouts asked for."""

    scope: str
    name: str
    maximum: int
    used: float
    requested: int


class BudgetExhausted(Refused):
    """A limit that waiting does not lift."""

    code = "budget_exhausted"
    status = 402

    def __init__(self, detail: str, reached: LimitReached) -> None:
        super().__init__(detail)
        self.reached = reached


class TooManyQueued(Refused):
    """Enough is accepted and unfinished. `retry_after` is a guess, in seconds, of when there is room."""

    code = "too_many_queued"
    status = 429

    def __init__(self, detail: str, reached: LimitReached, retry_after: int) -> None:
        super().__init__(detail)
        self.reached = reached
        self.retry_after = retry_after
