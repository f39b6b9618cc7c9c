"""The chat template: ChatML, with a default system prompt as many real templates have one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollouts.llm.scripted.tokenizer import END_OF_TURN, START_OF_TURN
from rollouts.llm.types import ChatMessage

Template = Callable[[Sequence[ChatMessage], bool], str]
"""Messages and `add_generation_prompt` to text."""

DEFAULT_SYSTEM = "You are a scripted model."
_TURN = re.compile(f"{re.escape(START_OF_TURN)}(system|user|assistant|tool)\n(.*?){re.escape(END_OF_TURN)}", re.DOTALL)
_REASONING = re.compile(r"^.*</think>\s*", re.DOTALL)


def chatml(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
    """Append-only: earlier messages look the same whatever follows."""
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    text = "".join(f"{START_OF_TURN}{m['role']}\n{m['content']}{END_OF_TURN}\n" for m in messages)
    return text + (f"{START_OF_TURN}assistant\n" if add_generation_prompt else "")


def chatml_dropping_reasoning(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
    """As Qwen3's: the reasoning of a reply disappears once a user message follows it, so it is not append-only."""
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    kept: list[ChatMessage] = [
        {"role": "assistant", "content": _REASONING.sub("", m["content"])} if m["role"] == "assistant" and i < last_user else m
        for i, m in enumerate(messages)
    ]
    return chatml(kept, add_generation_prompt)


class Prompt(NamedTuple):
    """A rendered prompt taken apart. `begun` is the beginning of a reply that it ends in; `text` is all before that."""

    messages: list[ChatMessage]
    begun: str
    text: str


def parse_prompt(text: str) -> Prompt:
    """Text of another shape counts as one user message."""
    turns = [ChatMessage(role=role, content=content) for role, content in _TURN.findall(text)]
    if not turns:
        return Prompt([{"role": "user", "content": text}], "", text)
    head, opening, begun = text.rpartition(f"{START_OF_TURN}assistant\n")
    if not opening or END_OF_TURN in begun:
        return Prompt(turns, "", text)
    return Prompt(turns, begun, head + opening)
