"""What a chat template puts between a sampled reply and the next one, found without touching the sampled ids.

A fixed conversation [user, assistant] is rendered with and without the new messages. What follows the fixed reply's end-of-turn
id in the longer render is exactly what must follow the sampled reply's, template glue included; a default system prompt and a
section about tools stand before it and drop out. docs/adr/0004-token-fidelity.md has the reasons.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from rollouts.llm.errors import ModelError
from rollouts.llm.types import ChatMessage, ServerAddress, TokenPrompt

REASONING_END = "</think>"
KEPT_BASES = 512  # fixed renders; each set of tools has its own

Tools = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's API writes them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class Render(Protocol):
    """`ModelClient.render`. Raises `ModelError`, of status 400 when the template refuses the messages."""

    async def __call__(
        self,
        server: ServerAddress,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenPrompt: ...


class _Style(NamedTuple):
    """How the fixed reply resembles the sampled ones: templates treat reasoning in its own way, wherever it is written."""

    inline_reasoning: bool
    reasoning_field: bool

    def message(self, text: str) -> ChatMessage:
        content = f"<think>\nr\n{REASONING_END}\n\n{text}" if self.inline_reasoning else text
        message = ChatMessage(role="assistant", content=content)
        if self.reasoning_field:
            message["reasoning_content"] = "r"
        return message


_PLAIN = _Style(False, False)


@dataclass(frozen=True)
class _Base:
    """The render of the fixed conversation. The last `closing` ids are what ends a reply, the end-of-turn id first."""

    ids: list[int]
    closing: int

    @property
    def head(self) -> list[int]:
        """Through the end-of-turn id; empty when this template cannot be continued."""
        return self.ids[: len(self.ids) - self.closing + 1] if self.closing else []


class _Template:
    """One server's template with its inputs that hold for a whole conversation."""

    def __init__(
        self, render: Render, server: ServerAddress, tools: Tools | None, template_kwargs: Mapping[str, Any] | None
    ) -> None:
        self._render, self._server, self._tools, self._kwargs = render, server, tools or None, template_kwargs or None
        inputs = json.dumps([self._tools, self._kwargs]).encode()
        self.key = (server.url, server.model, server.tokenizer, hashlib.blake2b(inputs, digest_size=16).digest())

    async def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> TokenPrompt:
        return await self._render(
            self._server,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=self._tools,
            template_kwargs=self._kwargs,
        )

    async def ids(self, fixed: Sequence[ChatMessage]) -> list[int]:
        return (await self.render(fixed, add_generation_prompt=False)).ids


class TurnRenderer:
    """Renders continuations. Of renders only the fixed ones are cached, by server, model and tools."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._bases: OrderedDict[tuple[object, ...], _Base] = OrderedDict()
        self._locks: WeakValueDictionary[tuple[object, ...], asyncio.Lock] = WeakValueDictionary()

    async def continuation(
        self,
        server: ServerAddress,
        last_id: int,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        *,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenPrompt | None:
        """What follows a sampled reply ending in `last_id`, up to and including the next generation prompt.

        `history` is what went before, the reply last. `tools` and `template_kwargs` are those of the prompt before it.

        None when this template cannot be continued exactly: the reply did not end with the template's end-of-turn id, the
        template changes earlier messages when later ones come (dropped reasoning, hoisted system messages, tools that move),
        or it refuses the new messages after the fixed ones.
        """
        template = _Template(self._render, server, tools, template_kwargs)
        style = _style(history)
        calls = _calls(history)
        try:
            head, longer = await asyncio.gather(
                self._head(template, style, calls),
                template.render([*_fixed(style.message("y"), calls), *new], add_generation_prompt=True),
            )
            if head and longer.ids[: len(head)] != head:
                # The template may only have changed since (a date in its system prompt, a restarted server).
                head = await self._head(template, style, calls, fresh=True)
        except ModelError as error:
            if error.status == 400:
                return None
            raise
        if not head or head[-1] != last_id or longer.ids[: len(head)] != head:
            return None
        return longer.since(len(head)) if len(longer.ids) > len(head) else None

    async def shows_tools(
        self, server: ServerAddress, tools: Tools, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether the template tells the model about `tools`. Where it does not, `toolcalls` describes them in words."""
        with_tools = await self._base(_Template(self._render, server, tools, template_kwargs), _PLAIN)
        without = await self._base(_Template(self._render, server, None, template_kwargs), _PLAIN)
        return with_tools.ids != without.ids

    async def _head(
        self, template: _Template, style: _Style, calls: Sequence[Mapping[str, Any]], *, fresh: bool = False
    ) -> list[int]:
        """What stands before the new messages: the fixed conversation through its end-of-turn id; empty when there is none."""
        base = await self._base(template, style, fresh=fresh)
        if not base.closing or not calls:
            return base.head
        # Not cached: the ids of calls are unique, and some templates write them out.
        ids = await template.ids(_fixed(style.message("y"), calls))
        same_end = ids[-base.closing :] == base.ids[-base.closing :]
        return _Base(ids, base.closing).head if same_end else []

    async def _base(self, template: _Template, style: _Style, *, fresh: bool = False) -> _Base:
        key = (*template.key, style)
        if fresh:
            self._bases.pop(key, None)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self._bases:
                self._bases[key] = await _measure(template, style)
                if len(self._bases) > KEPT_BASES:
                    self._bases.popitem(last=False)
            self._bases.move_to_end(key)
            return self._bases[key]


async def _measure(template: _Template, style: _Style) -> _Base:
    one = await template.ids(_fixed(style.message("y")))
    other = await template.ids(_fixed(style.message("z")))
    if style != _PLAIN and one == await template.ids(_fixed(_PLAIN.message("y"))):
        return _Base(one, 0)  # reasoning never survives this template, so a reply that has some cannot be continued
    return _Base(one, _common_suffix(one, other))


def _style(history: Sequence[ChatMessage]) -> _Style:
    replies = [m for m in history if m["role"] == "assistant"]
    return _Style(
        any(REASONING_END in reply["content"] for reply in replies),
        any(reply.get("reasoning_content") for reply in replies),
    )


def _calls(history: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The last reply's calls without their arguments: results are refused by some templates, and named by others, by them."""
    if not history or history[-1]["role"] != "assistant":
        return []
    return [
        {"id": call.get("id", ""), "type": "function", "function": {"name": call["function"]["name"], "arguments": {}}}
        for call in history[-1].get("tool_calls", ())
    ]


def _fixed(reply: ChatMessage, calls: Sequence[Mapping[str, Any]] = ()) -> list[ChatMessage]:
    if calls:
        reply = {**reply, "tool_calls": [dict(call) for call in calls]}
    return [{"role": "user", "content": "x"}, reply]


def _common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        length += 1
    return length
