"""The vocabulary of refusals: every `code` a client can meet, with its status and title. See docs/reference/errors.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollouts.services.errors import FieldError, LimitReached


class Kind(NamedTuple):
    """What is the same for every problem with one code."""

    status: int
    title: str


KINDS: Mapping[str, Kind] = {
    "malformed_json": Kind(400, "The body is not JSON"),
    "invalid_parameter": Kind(400, "A query parameter is wrong"),
    "invalid_cursor": Kind(400, "The cursor is not one of ours"),
    "invalid_idempotency_key": Kind(400, "The Idempotency-Key cannot be used"),
    "invalid_request": Kind(400, "The request cannot be understood"),
    "project_required": Kind(400, "It is not clear which project is meant"),
    "not_authenticated": Kind(401, "No API key"),
    "invalid_api_key": Kind(401, "The API key is not valid"),
    "budget_exhausted": Kind(402, "A budget is used up"),
    "csrf_failed": Kind(403, "The CSRF token is missing or wrong"),
    "insufficient_scope": Kind(403, "The API key may not do this"),
    "not_found": Kind(404, "Not found"),
    "method_not_allowed": Kind(405, "The method is not allowed here"),
    "not_acceptable": Kind(406, "No representation suits the Accept header"),
    "conflict": Kind(409, "This conflicts with what exists"),
    "idempotency_in_progress": Kind(409, "A request with this Idempotency-Key is still being carried out"),
    "body_too_large": Kind(413, "The body is too large"),
    "unsupported_media_type": Kind(415, "The body must be JSON"),
    "invalid": Kind(422, "The request is not valid"),
    "idempotency_key_reused": Kind(422, "The Idempotency-Key belongs to another request"),
    "too_many_queued": Kind(429, "Enough rollouts are waiting"),
    "internal_error": Kind(500, "Internal error"),
    "unavailable": Kind(503, "Something this needs does not answer"),
}


class Problem(Exception):
    """A refusal by the API layer itself. Services refuse with `rollouts.services.errors.Refused`."""

    def __init__(
        self,
        code: str,
        detail: str,
        errors: Sequence[FieldError] = (),
        *,
        headers: Mapping[str, str] | None = None,
        reached: LimitReached | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.errors = list(errors)
        self.headers = dict(headers or {})
        self.reached = reached


def document(
    code: str,
    detail: str,
    errors: Sequence[FieldError] = (),
    *,
    instance: str = "",
    status: int | None = None,
    reached: LimitReached | None = None,
) -> dict[str, object]:
    """The RFC 9457 document. `instance` is the path of the request; `reached` becomes the member `limit`."""
    kind = KINDS[code]
    return {
        "type": f"urn:prorl:error:{code}",
        "title": kind.title,
        "status": status or kind.status,
        "detail": detail,
        "instance": instance,
        "code": code,
        "errors": [error._asdict() for error in errors],
        **({"limit": reached._asdict()} if reached else {}),
    }
