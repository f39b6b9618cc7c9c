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
        return cls(status, problem["code"], problem["detail"], errors)
