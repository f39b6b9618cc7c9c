"""What OpenAI's APIs have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollouts.gateway.errors import CallRefused, Kind
from rollouts.gateway.fields import Fields
from rollouts.gateway.replies import CallOut, Reply
from rollouts.gateway.requests import FunctionTool

_TYPES = {
    Kind.INVALID: "invalid_request_error",
    Kind.UNAUTHENTICATED: "authentication_error",
    Kind.CLOSED: "permission_error",
    Kind.NOT_FOUND: "invalid_request_error",
    Kind.WRONG_METHOD: "invalid_request_error",
    Kind.TOO_LARGE: "invalid_request_error",
    Kind.TOO_MANY: "rate_limit_error",
}
_CODES = {Kind.UNAUTHENTICATED: "invalid_api_key", Kind.CLOSED: "session_closed", Kind.TOO_MANY: "rate_limit_exceeded"}


def error_body(error: CallRefused) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    code = "context_length_exceeded" if error.overflow else _CODES.get(error.kind)
    kind = _TYPES.get(error.kind, "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field or None, "code": code}}


def read_arguments(text: str) -> Any:
    """The arguments of a call as an object, or as the text that they are when they are no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def write_arguments(call: CallOut) -> str:
    """The arguments of a call as OpenAI's APIs give them: JSON in a string."""
    return json.dumps(call.arguments, ensure_ascii=False)


def read_function(fields: Fields) -> FunctionTool:
    """A function's name, description and parameters."""
    name = fields.text("name")
    if not name:
        raise fields.refuse("name", "is required")
    parameters = fields.raw("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise fields.refuse("parameters", "must be a JSON Schema object")
    return FunctionTool(name, fields.text("description"), parameters or {"type": "object", "properties": {}})


def usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Of all replies to one request; they share its prompt."""
    prompt = replies[0].record.prompt_tokens
    sampled = sum(reply.sampled_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
