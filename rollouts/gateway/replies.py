"""What an agent gets back, whichever API it speaks: a whole reply, or the events it comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rollouts.llm.types import ChatMessage, ModelCallRecord

Ending = Literal["stop", "length", "tool_calls", "content_filter"]


class CallOut(NamedTuple):
    """A tool call as the agent is given it; `id` is what it names the result by."""

    id: str
    name: str
    arguments: Mapping[str, Any]


class TextDelta(NamedTuple):
    """More of the reply's content."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of what it thought."""

    text: str


class CallDelta(NamedTuple):
    """A whole tool call: an agent can do nothing with half of one."""

    number: int
    call: CallOut


class Told(NamedTuple):
    """A sampled text as the agent is told it: apart from its calls and reasoning, and without the stop string that ended it."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallOut, ...] = ()
    stop: str | None = None

    def message(self) -> ChatMessage:
        """As the agent will send it back."""
        message: ChatMessage = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.calls
            ]
        return message

    def events(self) -> list[Event]:
        """All of it at once."""
        events: list[Event] = [ReasoningDelta(self.reasoning)] if self.reasoning else []
        events += [TextDelta(self.content)] if self.content else []
        return events + [CallDelta(number, call) for number, call in enumerate(self.calls)]


@dataclass(frozen=True)
class Reply:
    """A whole reply. `record` is the call as it was stored."""

    told: Told
    record: ModelCallRecord

    @property
    def ending(self) -> Ending:
        """Why it ended, in OpenAI's words."""
        if self.record.finish_reason == "stop":
            return "tool_calls" if self.told.calls else "stop"
        return "content_filter" if self.record.finish_reason == "content_filter" else "length"

    @property
    def sampled_tokens(self) -> int:
        return len(self.record.sampled_ids)


class Finished(NamedTuple):
    """The end. All of `reply` was told in the events before."""

    reply: Reply


Event = TextDelta | ReasoningDelta | CallDelta | Finished
