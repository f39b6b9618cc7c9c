"""A turn while it happens, so that what is known of it can be stored at any moment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rollouts.engine.records import MessageRecord, ToolCallRecord, TurnRecord
from rollouts.engine.tools import ToolResult
from rollouts.llm.messages import numbered_pictures
from rollouts.llm.types import ChatMessage, ModelCallRecord, ToolCallRequest

_CUT_SHORT = "the rollout ended before the call returned"


@dataclass
class TurnDraft:
    """Collects one `TurnRecord`. `first_message` is the conversation-wide index of its first message."""

    turn: int
    first_message: int
    messages: list[MessageRecord] = field(default_factory=list)
    model_call: ModelCallRecord | None = None
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    _pending: tuple[ToolCallRequest, float] | None = None

    def add_message(self, message: ChatMessage, *, name: str = "") -> None:
        index = self.first_message + len(self.messages)
        pictures = tuple(picture for _, picture in numbered_pictures([message]))
        self.messages.append(MessageRecord(index, self.turn, message["role"], message["content"], name, pictures))

    def start_call(self, request: ToolCallRequest) -> None:
        self._pending = (request, time.time())

    def end_call(self, result: ToolResult) -> None:
        """Record what came of the call that `start_call` announced."""
        assert self._pending is not None  # noqa: S101 - calls come in pairs
        (request, started_at), self._pending = self._pending, None
        self.tool_calls.append(
            ToolCallRecord(
                turn=self.turn,
                index=len(self.tool_calls),
                name=request.name,
                arguments=request.arguments,
                raw=request.raw,
                output=result.output,
                started_at=started_at,
                duration=max(0.0, time.time() - started_at),
                exit_code=result.exit_code,
                timed_out=result.timed_out,
                truncated_bytes=result.truncated_bytes,
                error=result.error,
                note=result.note,
                running=result.running,
                limit_exceeded=result.limit_exceeded,
                pictures=result.pictures,
            )
        )

    def record(self) -> TurnRecord | None:
        """What is known so far, or None when nothing is. A call that has not returned is recorded as cut short."""
        if self._pending is not None:
            self.end_call(ToolResult("", error=_CUT_SHORT))
        if not self.messages and self.model_call is None:
            return None
        return TurnRecord(self.turn, self.messages, self.model_call, self.tool_calls)
