"""A reply taken apart while it is sampled: reasoning, text, and whole tool calls, each as early as it is certain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollouts.llm.toolformats import HERMES, ToolFormat, Unclosed, partial_end
from rollouts.llm.turns import REASONING_END
from rollouts.llm.types import ToolCallRequest

REASONING_START = "<think>"


@dataclass(frozen=True)
class ReplyPart:
    """A piece of a reply, in order. `text` is as written; of a part of kind "call" it is all that belongs to the call."""

    kind: Literal["reasoning", "text", "call"]
    text: str
    call: ToolCallRequest | None = None


class ReplyReader:
    """Feed it what is sampled, then `finish`. Parts that follow each other without a gap make up the whole reply.

    Text goes out as soon as it cannot be the beginning of a tag. Calls are not checked against the tools: that is for whoever
    carries them out. One that cannot be read is text. `thinking` says that the prompt has already opened the reasoning;
    `schemas` are the parameters of each tool, where known.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = HERMES,
        *,
        thinking: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Without a `tool_format` no calls are looked for."""
        self._format = tool_format
        self._schemas = schemas or {}
        self._state: Literal["start", "reasoning", "content"] = "reasoning" if thinking else "start"
        self._pending = ""
        self._alone = True  # nothing but calls and space has gone out
        self._looked_at = 0  # how much of a call was there when it was last found unclosed

    def feed(self, text: str) -> list[ReplyPart]:
        """The parts that have become certain with this `text`."""
        self._pending += text
        return list(self._parts(final=False))

    def finish(self) -> list[ReplyPart]:
        """What was held back, now that nothing more comes."""
        return list(self._parts(final=True))

    def _parts(self, *, final: bool) -> Iterator[ReplyPart]:
        if self._state == "start":
            begun = self._pending.lstrip()
            if not final and REASONING_START.startswith(begun):
                return  # also when nothing has come yet
            self._state = "reasoning" if begun.startswith(REASONING_START) else "content"
        if self._state == "reasoning":
            yield from self._reasoning(final=final)
        if self._state == "content" and self._pending:
            yield from self._content(final=final)

    def _reasoning(self, *, final: bool) -> Iterator[ReplyPart]:
        end = self._pending.find(REASONING_END)
        if end >= 0:
            yield self._take("reasoning", end + len(REASONING_END))
            self._state = "content"
            return
        certain = len(self._pending) - (0 if final else partial_end(self._pending, REASONING_END))
        if certain:
            yield self._take("reasoning", certain)

    def _content(self, *, final: bool) -> Iterator[ReplyPart]:
        while self._format is not None and (start := self._format.start(self._pending, alone=self._alone)) >= 0:
            if start:
                yield self._take("text", start)
            if not final and self._format.closing not in self._pending[max(0, self._looked_at - len(self._format.closing)) :]:
                self._looked_at = len(self._pending)
                return
            try:
                raw = self._format.read(self._pending, 0, self._schemas)
            except Unclosed:
                if not final:
                    self._looked_at = len(self._pending)
                    return
                yield self._take("text", len(self._pending))
                return
            except ValueError:
                yield self._take("text", self._format.skip(self._pending, 0))
                continue
            if not isinstance(raw.name, str) or not isinstance(raw.arguments, dict):
                yield self._take("text", raw.end)
                continue
            text = self._take("call", raw.end).text
            yield ReplyPart("call", text, ToolCallRequest(raw.name, raw.arguments, text))
        held_back = 0 if final or self._format is None else self._format.held_back(self._pending, alone=self._alone)
        if len(self._pending) > held_back:
            yield self._take("text", len(self._pending) - held_back)

    def _take(self, kind: Literal["reasoning", "text", "call"], length: int) -> ReplyPart:
        taken, self._pending = self._pending[:length], self._pending[length:]
        self._looked_at = 0
        self._alone = self._alone and (kind != "text" or not taken.strip(" \n\t;"))
        return ReplyPart(kind, taken)
