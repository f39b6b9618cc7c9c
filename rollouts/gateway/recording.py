"""What a request adds to the record of its session: messages, and the tool calls whose results it brings."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from rollouts.engine.records import MessageRecord, ToolCallRecord
from rollouts.gateway.branches import Point
from rollouts.gateway.replies import CallOut
from rollouts.llm.messages import numbered_pictures
from rollouts.llm.types import ChatMessage


def message_records(
    messages: Sequence[ChatMessage], *, first_index: int, turn: int, asked_in: int | None
) -> list[MessageRecord]:
    """The messages that a request brought. Tool results belong to the turn that asked for them, if it is known."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    return [
        MessageRecord(
            index=first_index + number,
            turn=turn if asked_in is None or message["role"] != "tool" else asked_in,
            role=message["role"],
            content=_as_text(message),
            name=message.get("name") or names.get(message.get("tool_call_id", ""), ""),
            pictures=tuple(picture for _, picture in numbered_pictures([message])),
        )
        for number, message in enumerate(messages)
    ]


def tool_call_records(point: Point, reply: ChatMessage, results: Sequence[ChatMessage]) -> list[ToolCallRecord]:
    """The calls of an earlier reply with what `results`, which follow it, say that came of them."""
    outputs = {m.get("tool_call_id", ""): m["content"] for m in results if m["role"] == "tool"}
    now = time.time()
    return [
        ToolCallRecord(
            turn=point.turn,
            index=index,
            name=call["function"]["name"],
            arguments=_as_object(call["function"]["arguments"]),
            raw=json.dumps(call["function"], ensure_ascii=False),
            output=outputs[call["id"]],
            started_at=point.at,
            duration=max(0.0, now - point.at),
        )
        for index, call in enumerate(reply.get("tool_calls", ()))
        if call["id"] in outputs
    ]


def unanswered_record(turn: int, index: int, call: CallOut) -> ToolCallRecord:
    """A call of which the agent has not told yet what came of it."""
    function = {"name": call.name, "arguments": call.arguments}
    return ToolCallRecord(
        turn=turn,
        index=index,
        name=call.name,
        arguments=dict(call.arguments),
        raw=json.dumps(function, ensure_ascii=False),
        output="",
        started_at=time.time(),
        duration=0.0,
        error="the agent never told what came of it",
    )


def _as_object(arguments: Any) -> dict[str, Any]:
    return arguments if isinstance(arguments, dict) else {"": arguments}


def _as_text(message: ChatMessage) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join(filter(None, [message["content"], *calls]))
