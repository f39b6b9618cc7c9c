"""What an agent gets back, whichever API it speaks: a whole reply, or the events it comes in."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rollouts.llm.types import ChatMessage, ModelCallRecord

Ending = Literal["stop", "length", "tool_calls", "content_filter"]


class CallOut(NamedTuple):
    """A tool call as the agent is given it; `id` is what it names the result by."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """A whole reply. `content` is without reasoning and calls; `record` is the call as it was stored."""

    content: str
    reasoning: str
    calls: tuple[CallOut, ...]
    ending: Ending
    record: ModelCallRecord
    stop_string: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    def message(self) -> ChatMessage:
        """As the agent will send it back."""
        message: ChatMessage = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.calls
            ]
        return message


class TextDelta(NamedTuple):
    """More of the reply's content."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of what it thought."""

    text: str


class CallDelta(NamedTuple):
    """A whole tool call: an agent can do nothing with half of one."""

    index: int
    call: CallOut


class Finished(NamedTuple):
    """The end. All of `reply` was told in the events before."""

    reply: Reply


Event = TextDelta | ReasoningDelta | CallDelta | Finished
