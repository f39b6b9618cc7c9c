"""Telling an agent what was sampled: what was thought, what is said, and which tools are called, as it becomes certain."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from rollouts.gateway.replies import CallDelta, CallOut, Event, ReasoningDelta, TextDelta, Told
from rollouts.gateway.requests import ModelRequest
from rollouts.llm.replies import REASONING_START, ReplyPart, ReplyReader
from rollouts.llm.toolformats import ToolFormat, partial_end
from rollouts.llm.turns import REASONING_END

_CALL_ID_CHARACTERS = string.ascii_letters + string.digits
_CALL_ID_LENGTH = 9  # Mistral's templates refuse any other


class Telling:
    """Feed it a reply's text as it comes, then `end`. Calls that cannot be read are text, for the agent to judge.

    `stops` are the strings of which one may end the text; it is not told. `thinking` says that the prompt has already opened
    the reasoning.
    """

    def __init__(self, request: ModelRequest, stops: Sequence[str], tool_format: ToolFormat, *, thinking: bool = False) -> None:
        self._is_raw = request.prompt is not None  # text without a structure
        may_call = bool(request.tools) and request.may_call
        schemas = {tool.name: tool.parameters for tool in request.tools}
        self._reader = ReplyReader(tool_format if may_call else None, thinking=thinking, schemas=schemas)
        self._max_calls = None if request.parallel_calls else 1
        self._stops = stops
        self._came = self._held = ""  # all of the text, and its end that may be the beginning of a stop string
        self._reasoning = self._content = self._space = ""
        self._calls: list[CallOut] = []
        self._events: list[Event] = []

    def add(self, text: str) -> list[Event]:
        """What can be told with this."""
        self._came += text
        text = self._held + text
        held = max((len(stop) if text.endswith(stop) else partial_end(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return self._tell(text[: len(text) - held])

    def end(self, text: str) -> tuple[Told, list[Event]]:
        """The rest, of which `text` is the whole, and all that was told."""
        rest = self._held + (text[len(self._came) :] if text.startswith(self._came) else "")
        stop = next((stop for stop in self._stops if text.endswith(stop)), None)
        events = self._tell(rest.removesuffix(stop or ""), last=True)
        if not self._calls and self._space:
            events += [TextDelta(self._space)]
            self._content += self._space
        return Told(self._content, self._reasoning, tuple(self._calls), stop), events

    def _tell(self, text: str, *, last: bool = False) -> list[Event]:
        self._events = []
        parts = [ReplyPart("text", text)] if self._is_raw else self._reader.feed(text)
        if last and not self._is_raw:
            parts += self._reader.finish()
        for part in parts:
            if part.call is not None:
                self._call(CallOut(_new_call_id(), part.call.name, part.call.arguments))
            elif part.kind == "reasoning":
                self._think(part.text)
            else:
                self._say(part.text)
        return self._events

    def _call(self, call: CallOut) -> None:
        if self._max_calls is None or len(self._calls) < self._max_calls:
            self._events.append(CallDelta(len(self._calls), call))
            self._calls.append(call)

    def _think(self, text: str) -> None:
        text = text.removesuffix(REASONING_END)
        if not self._reasoning:
            text = text.lstrip().removeprefix(REASONING_START).lstrip()
        text = self._without_last_space(text)
        if text:
            self._reasoning += text
            self._events.append(ReasoningDelta(text))

    def _say(self, text: str) -> None:
        if not self._content and (self._reasoning or self._calls):
            self._space = ""
            text = text.lstrip()
        text = self._without_last_space(text)
        if text:
            self._content += text
            self._events.append(TextDelta(text))

    def _without_last_space(self, text: str) -> str:
        """White space is told once something follows it: before a call, and after what was thought, it means nothing."""
        text = self._space + text
        told = text.rstrip()
        self._space = text[len(told) :]
        return told


def take_apart(
    text: str, request: ModelRequest, stops: Sequence[str], tool_format: ToolFormat, *, thinking: bool = False
) -> Told:
    """A whole text at once. Where it ends its reasoning, `thinking` need not be known."""
    begins = text.lstrip().startswith(REASONING_START)
    return Telling(request, stops, tool_format, thinking=not begins and (thinking or REASONING_END in text)).end(text)[0]


def _new_call_id() -> str:
    return "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(_CALL_ID_LENGTH))
