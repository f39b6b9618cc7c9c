"""What a chat template puts between a sampled reply and the next one, found without touching the sampled ids.

A fixed conversation [user, assistant] is rendered with and without the new messages. What follows the fixed reply's end-of-turn
id in the longer render is exactly what must follow the sampled reply's, template glue included; a default system prompt stands
before it and drops out. docs/adr/0004-token-fidelity.md has the reasons.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from rollouts.llm.types import ChatMessage, ServerAddress

REASONING_END = "</think>"
_PLAIN = ""
_REASONING = "<think>\nr\n</think>\n\n"


class Render(Protocol):
    """`ModelClient.render`."""

    async def __call__(
        self, server: ServerAddress, messages: Sequence[ChatMessage], *, add_generation_prompt: bool
    ) -> list[int]: ...


_Key = tuple[str, str, str]  # url, model, what stands before the fixed reply


class TurnRenderer:
    """Renders continuations. The fixed base renders are cached by server url and model; nothing else is."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._heads: dict[_Key, list[int]] = {}
        self._locks: defaultdict[_Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def continuation(
        self, server: ServerAddress, last_id: int, history: Sequence[ChatMessage], new: Sequence[ChatMessage]
    ) -> list[int] | None:
        """The ids that follow a sampled reply ending in `last_id`, up to and including the next generation prompt.

        None when this template cannot be continued exactly: the reply did not end with the template's end-of-turn id, or the
        template changes earlier messages when later ones come (dropped reasoning, hoisted system messages).
        """
        reasoned = any(m["role"] == "assistant" and REASONING_END in m["content"] for m in history)
        prefix = _REASONING if reasoned else _PLAIN
        head = await self._head(server, prefix)
        if not head or head[-1] != last_id:
            return None
        longer = await self._render(server, [*_base(prefix + "y"), *new], add_generation_prompt=True)
        if longer[: len(head)] != head:
            # The template may only have changed since (a date in its system prompt, a restarted server).
            head = await self._head(server, prefix, fresh=True)
        if not head or head[-1] != last_id or longer[: len(head)] != head:
            return None
        return longer[len(head) :] or None

    async def _head(self, server: ServerAddress, prefix: str, *, fresh: bool = False) -> list[int]:
        """The base render through its end-of-turn id; empty when the template closes a reply with nothing of its own."""
        key = (server.url, server.model, prefix)
        if fresh:
            self._heads.pop(key, None)
        async with self._locks[key]:
            if key not in self._heads:
                self._heads[key] = await self._measure_head(server, prefix)
            return self._heads[key]

    async def _measure_head(self, server: ServerAddress, prefix: str) -> list[int]:
        one = await self._render(server, _base(prefix + "y"), add_generation_prompt=False)
        other = await self._render(server, _base(prefix + "z"), add_generation_prompt=False)
        if prefix and one == await self._render(server, _base("y"), add_generation_prompt=False):
            return []  # reasoning never survives this template, so a reply that has some cannot be continued
        closing = _common_suffix(one, other)
        return one[: len(one) - closing + 1] if closing else []


def _base(reply: str) -> list[ChatMessage]:
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": reply}]


def _common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        length += 1
    return length
