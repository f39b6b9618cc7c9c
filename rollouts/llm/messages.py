"""Messages on their way to a model server: OpenAI's shape, and nothing in them that would be lost on the way."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollouts.llm.errors import ModelError
from rollouts.llm.types import ChatMessage
from sandboxes.protocol import Picture

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
PICTURE_PART = "picture"
_ROLES_WITH_PICTURES = frozenset({"user", "tool"})


def as_sent(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as OpenAI's API writes them. Raises `ModelError` (status 400) as `refuse_media` does."""
    refuse_media(messages)
    return [_as_sent(message) for message in messages]


def pictures_in(messages: Sequence[ChatMessage]) -> dict[str, Picture]:
    """The pictures of these messages, by the SHA-256 of their data, which is all that is kept of them beside ids."""
    return {picture.digest: picture for _, picture in numbered_pictures(messages)}


def numbered_pictures(messages: Sequence[ChatMessage]) -> Iterator[tuple[int, Picture]]:
    """Every picture in order, with the index of its message."""
    for number, message in enumerate(messages):
        for part in message.get("parts", ()):
            if part.get("type") == PICTURE_PART:
                yield number, part["picture"]


def data_url(picture: Picture) -> str:
    """The picture itself, where OpenAI's API has a web address."""
    return f"data:{picture.mime};base64,{base64.b64encode(picture.data).decode()}"


def refuse_media(messages: Sequence[ChatMessage]) -> None:
    """Raise `ModelError` (status 400) when a message has a part that is neither text nor a picture that a model may see.

    A prompt of ids has only placeholders for it; the data itself would be missing, and nobody would notice.
    """
    for number, message in enumerate(messages):
        for part in message.get("parts", ()):
            kind = part.get("type")
            if kind in TEXT_PARTS:
                continue
            if kind != PICTURE_PART:
                raise _refusal(
                    f"message {number} has a part of type {kind!r}: prompts are sent as token ids, "
                    "beside which only pictures can be sent; send text and pictures only"
                )
            if message["role"] not in _ROLES_WITH_PICTURES:
                role = message["role"]
                raise _refusal(f"message {number} of role {role!r} has a picture: put it into a user's or a tool's message")


def refuse_pictures(messages: Sequence[ChatMessage], why: str) -> None:
    """Raise `ModelError` (status 400), with the first message that has one and `why` it cannot be sent, when there are any."""
    for number, _ in numbered_pictures(messages):
        raise _refusal(f"message {number} has a picture: {why}")


def _refusal(message: str) -> ModelError:
    return ModelError(message, retryable=False, status=400)


def _as_sent(message: ChatMessage) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message["role"], "content": content_as_sent(message)}
    if reasoning := message.get("reasoning_content"):
        sent |= {"reasoning": reasoning, "reasoning_content": reasoning}  # vLLM's word for it, and everybody else's
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_call_as_sent(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if key in message:
            sent[key] = message[key]
    return sent


def content_as_sent(message: ChatMessage) -> str | list[dict[str, Any]]:
    """Of one message, pictures included."""
    parts = message.get("parts")
    return message["content"] if parts is None else [_part_as_sent(part) for part in parts]


def _part_as_sent(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != PICTURE_PART:
        return part
    return {"type": "image_url", "image_url": {"url": data_url(part["picture"])}}


def _call_as_sent(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call.get("id", ""), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
