"""What the API says when it refuses."""

from __future__ import annotations

from typing import NamedTuple

import httpx


class FieldError(NamedTuple):
    """One thing wrong: a JSON pointer into the body (`/groups/0/n`) or `?name` of a query parameter, and why."""

    pointer: str
    detail: str


class ApiError(Exception):
    """An answer other than success, after the repeats that made sense.

    `code` is stable and listed in the reference of errors; it is `http_<status>` for answers that are not the API's own but,
    say, a proxy's.
    """

    def __init__(self, status: int, code: str, detail: str, errors: list[FieldError]) -> None:
        lines = [f"{status} {code}: {detail}", *(f"  {error.pointer}: {error.detail}" for error in errors)]
        super().__init__("\n".join(lines))
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = errors

    @classmethod
    def from_response(cls, response: httpx.Response) -> ApiError:
        status = response.status_code
        if response.headers.get("Content-Type") != "application/problem+json":
            return cls(status, f"http_{status}", response.text[:200], [])
        problem = response.json()
        errors = [FieldError(error["pointer"], error["detail"]) for error in problem["errors"]]
        kind = _OVER_LIMIT.get(problem["code"])
        if kind is not None:
            limit = LimitReached(*(problem["limit"][name] for name in LimitReached._fields))
            return kind(status, problem["code"], problem["detail"], errors, limit)
        return cls(status, problem["code"], problem["detail"], errors)


class LimitReached(NamedTuple):
    """Whose limit it is (`run` or `project`), its name and value, what is used of it, and rollouts asked for."""

    scope: str
    name: str
    maximum: int
    used: float
    requested: int


class OverLimit(ApiError):
    """A submission was refused for a limit, and has changed nothing."""

    def __init__(self, status: int, code: str, detail: str, errors: list[FieldError], limit: LimitReached) -> None:
        super().__init__(status, code, detail, errors)
        self.limit = limit


class BudgetExhausted(OverLimit):
    """A budget is used up. Only raising the limit helps, so this is not repeated."""


class TooManyQueued(OverLimit):
    """Enough rollouts are unfinished, and were so for as long as the client repeated the request."""


_OVER_LIMIT: dict[str, type[OverLimit]] = {"budget_exhausted": BudgetExhausted, "too_many_queued": TooManyQueued}
