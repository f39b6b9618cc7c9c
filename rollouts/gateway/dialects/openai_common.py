"""What OpenAI's APIs have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollouts.gateway.errors import CallRefused, Kind
from rollouts.gateway.fields import Fields
from rollouts.gateway.replies import CallOut, Reply
from rollouts.gateway.requests import FunctionTool
from rollouts.llm import portable_json

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
    message, code = str(error), _CODES.get(error.kind)
    if error.overflow:
        prompt, limit = error.overflow
        # In these words, which agents look for.
        message = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {prompt} tokens."
        code = "context_length_exceeded"
    kind = _TYPES.get(error.kind, "server_error")
    return {"error": {"message": message, "type": kind, "param": error.field or None, "code": code}}


def read_arguments(text: str) -> Any:
    """The arguments of a call as an object, or as the text that they are when they are no JSON object."""
    try:
        value = portable_json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def write_arguments(call: CallOut) -> str:
    """The arguments of a call as OpenAI's APIs give them: JSON in a string."""
    return json.dumps(call.arguments, ensure_ascii=False)


def call_item(call: CallOut) -> dict[str, Any]:
    """A call as an item of a response."""
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": write_arguments(call),
        "status": "completed",
    }


def read_may_call(body: Fields) -> bool:
    """Whether the model may call tools. That it must cannot be promised."""
    choice = body.raw("tool_choice")
    if choice not in (None, "auto", "none"):
        raise body.refuse("tool_choice", "only auto and none are supported")
    return bool(choice != "none")


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
