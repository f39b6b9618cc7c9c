"""Messages on their way to a server's `/tokenize`: OpenAI's shape, and nothing in them that would be lost on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.llm.errors import ModelError
from rollouts.llm.types import ChatMessage

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def as_sent(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as OpenAI's API writes them. Raises `ModelError` (status 400) as `refuse_media` does."""
    refuse_media(messages)
    return [_as_sent(message) for message in messages]


def refuse_media(messages: Sequence[ChatMessage]) -> None:
    """Raise `ModelError` (status 400) when a message has a part that is no text.

    A prompt of ids has only placeholders for a picture; the picture itself would be missing, and nobody would notice.
    """
    for number, message in enumerate(messages):
        for part in message.get("parts", ()):
            if part.get("type") not in TEXT_PARTS:
                raise ModelError(
                    f"message {number} has a part of type {part.get('type')!r}: prompts are sent as token ids, "
                    "which cannot carry pictures, sound or files; send text only",
                    retryable=False,
                    status=400,
                )


def _as_sent(message: ChatMessage) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message["role"], "content": message.get("parts", message["content"])}
    if reasoning := message.get("reasoning_content"):
        sent |= {"reasoning": reasoning, "reasoning_content": reasoning}  # vLLM's word for it, and everybody else's
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_call_as_sent(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if key in message:
            sent[key] = message[key]
    return sent


def _call_as_sent(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call.get("id", ""), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
