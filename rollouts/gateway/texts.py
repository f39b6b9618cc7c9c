"""Taking sampled text apart: what it thought, what it says, and which tools it calls."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from rollouts.gateway.replies import CallDelta, CallOut, Event, ReasoningDelta, TextDelta, Told
from rollouts.gateway.requests import FunctionTool, ModelRequest
from rollouts.llm.toolcalls import OPEN, parse_reply
from rollouts.llm.turns import REASONING_END

REASONING_START = "<think>"


def take_apart(text: str, request: ModelRequest, stops: Sequence[str]) -> Told:
    """A whole text. Calls that are written wrongly, or of tools that are not offered, stay text for the agent to judge.

    `stops` are the strings of which one may have ended it.
    """
    stop = next((stop for stop in stops if text.endswith(stop)), None)
    reasoning, visible = _split_reasoning(text.removesuffix(stop or ""))
    if not _may_call(request):
        return Told(visible, reasoning, (), stop)
    tools: Mapping[str, FunctionTool] = {tool.name: tool for tool in request.tools}
    parsed = parse_reply(visible, tools)
    if parsed.errors or not parsed.calls:
        return Told(visible.strip(), reasoning, (), stop)
    calls = parsed.calls if request.parallel_calls else parsed.calls[:1]
    out = tuple(CallOut(f"call_{secrets.token_hex(12)}", call.name, call.arguments) for call in calls)
    return Told(parsed.content, reasoning, out, stop)


class Telling:
    """Tells a text as it comes. What may be the beginning of a call or of a tag waits until it is known what it is."""

    def __init__(self, request: ModelRequest, stops: Sequence[str]) -> None:
        self._request = request
        self._stops = stops
        self._text = ""
        self._content = self._reasoning = ""  # what was told
        self._tags = (OPEN, *stops) if _may_call(request) else tuple(stops)

    def add(self, text: str) -> list[Event]:
        """What can be told of it."""
        self._text += text
        if len(self._text) < len(REASONING_START) and REASONING_START.startswith(self._text):
            return []
        reasoning, visible = _split_reasoning(self._text)
        if REASONING_END not in self._text:
            reasoning = _before_tag(reasoning, (REASONING_END,)).rstrip()
        return self._more(reasoning, self._settled(visible))

    def end(self, text: str) -> tuple[Told, list[Event]]:
        """The rest, of which `text` is the whole, and all that was told."""
        whole = take_apart(text, self._request, self._stops)
        events = self._more(whole.reasoning, whole.content)
        events += [CallDelta(index, call) for index, call in enumerate(whole.calls)]
        return whole._replace(content=self._content), events

    def _settled(self, visible: str) -> str:
        if _may_call(self._request):
            return _before_tag(visible.lstrip(), self._tags).rstrip()
        return _before_tag(visible, self._tags)

    def _more(self, reasoning: str, content: str) -> list[Event]:
        events: list[Event] = []
        if len(reasoning) > len(self._reasoning) and reasoning.startswith(self._reasoning):
            events.append(ReasoningDelta(reasoning[len(self._reasoning) :]))
            self._reasoning = reasoning
        if len(content) > len(self._content) and content.startswith(self._content):
            events.append(TextDelta(content[len(self._content) :]))
            self._content = content
        return events


def _may_call(request: ModelRequest) -> bool:
    return bool(request.tools) and request.tool_choice.mode != "none"


def _split_reasoning(text: str) -> tuple[str, str]:
    """What was thought, without its tags, and what was said. The opening tag may have been part of the prompt."""
    thought, tag, said = text.partition(REASONING_END)
    if tag:
        return thought.removeprefix(REASONING_START).strip(), said.lstrip("\n")
    if text.startswith(REASONING_START):
        return text.removeprefix(REASONING_START).strip(), ""
    return "", text


def _before_tag(text: str, tags: tuple[str, ...]) -> str:
    """What comes before the first of the tags, also if only its beginning is there yet."""
    end = min([position for tag in tags if (position := text.find(tag)) >= 0], default=len(text))
    text = text[:end]
    begun = [length for tag in tags for length in range(1, min(len(tag), len(text) + 1)) if text.endswith(tag[:length])]
    return text[: len(text) - max(begun, default=0)]
