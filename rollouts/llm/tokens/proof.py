"""Whether the local tokenizer renders as the server does: on a battery of conversations, id by id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple, Protocol

from rollouts.llm.errors import ModelError
from rollouts.llm.turns import Render, Tools
from rollouts.llm.types import ChatMessage, ServerAddress


class Renders(Protocol):
    """`ModelClient`."""

    @property
    def render(self) -> Render: ...


class _Case(NamedTuple):
    name: str
    messages: Sequence[ChatMessage]
    tools: Tools | None = None


def _user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def _said(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}


def _called(*names: str) -> ChatMessage:
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": name, "arguments": {"query": 'a "b" <é>', "limit": 3, "deep": {"x": [1.5, None, True]}}},
        }
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: int, text: str) -> ChatMessage:
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05}"}


_SYSTEM: ChatMessage = {"role": "system", "content": "Be brief.\n\nAnd kind."}
_REASONED: ChatMessage = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Find <things> & 'more' — naïvely.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What?"}, "limit": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }
    for name in ("search", "look_up")
]
_CASES = (
    _Case("a question", [_user("Hi")]),
    _Case("a conversation", [_SYSTEM, _user("Hi"), _said("Hello."), _user("Why?")]),
    _Case("text that merges across messages", [_user(" the\n"), _said("\n the"), _user("  \n\n\ttheother ")]),
    _Case("all kinds of characters", [_user("naïve 日本語 🙂👩‍👩‍👧 \u0301e \u200b\ufeff ﬁ Å Ａ\r\n\x07 𝔘")]),
    _Case("empty texts", [_user(""), _said(""), _user("")]),
    _Case(
        "special tokens written by a user", [_user("<|im_end|>\n<|im_start|>system\n</s><s><|eot_id|><|endoftext|>[INST]<bos>")]
    ),
    _Case("template code written by a user", [_user("{{ 7 * 7 }}{% raw %}{# no #}")]),
    _Case("reasoning in the text", [_user("2+2?"), _said("<think>\n2 and 2\n</think>\n\n4"), _user("Sure?")]),
    _Case("reasoning in its field", [_user("2+2?"), _REASONED, _user("Sure?"), _REASONED]),
    _Case("a system message in the middle", [_user("Hi"), _said("Hello."), {"role": "system", "content": "Stop."}, _user("?")]),
    _Case("tools that are not used", [_SYSTEM, _user("Find it.")], _TOOLS),
    _Case("a tool's result", [_user("Find it."), _called("search"), _result(0, '{"found": "é"}')], _TOOLS),
    _Case(
        "results in parallel, then the user",
        [_user("Find it."), _called("search", "look_up"), _result(0, "a\n"), _result(1, ""), _user("And?")],
        _TOOLS,
    ),
    _Case("a result without tools", [_user("Find it."), _called("search"), _result(0, "a"), _said("Here.")]),
    _Case("text in parts", [{"role": "user", "content": "a\nb", "parts": [{"type": "text", "text": t} for t in ("a", "b")]}]),
    _Case("a long text", [_user("One two three, 4 5 678.\n" * 400)]),
)


async def prove_equal(client: Renders, server: ServerAddress) -> int:
    """Render a battery of conversations with `server.tokenizer` and with the server itself; how many were compared.

    A conversation that both refuse counts as equal. Raises `ModelError`, not retryable, with the first difference.
    """
    if not server.tokenizer:
        raise ValueError("the server has no local tokenizer to compare with")
    remote = replace(server, tokenizer="")
    for case, prompt in _each_way():
        here = await _try(client, server, case, prompt=prompt)
        there = await _try(client, remote, case, prompt=prompt)
        if isinstance(here, list) and isinstance(there, list) and here == there:
            continue
        if isinstance(here, str) and isinstance(there, str):
            continue
        raise ModelError(
            f"the tokenizer in {server.tokenizer} does not render as {server.url} does ({case.name}, "
            f"{'with' if prompt else 'without'} generation prompt): {_difference(here, there)}. Use the files and the chat "
            f"template that the server was started with. The conversation: {json.dumps(case.messages)[:300]}",
            retryable=False,
        )
    return 2 * len(_CASES)


def _each_way() -> Iterator[tuple[_Case, bool]]:
    return ((case, prompt) for case in _CASES for prompt in (True, False))


async def _try(client: Renders, server: ServerAddress, case: _Case, *, prompt: bool) -> list[int] | str:
    """The ids, or why the template refuses them."""
    try:
        return (await client.render(server, case.messages, add_generation_prompt=prompt, tools=case.tools)).ids
    except ModelError as error:
        if error.status != 400:
            raise
        return str(error)


def _difference(here: list[int] | str, there: list[int] | str) -> str:
    if isinstance(here, str):
        return f"here {here!r}, there {len(there)} ids"
    if isinstance(there, str):
        return f"here {len(here)} ids, there {there!r}"
    place = next(number for number, (a, b) in enumerate(zip_longest(here, there)) if a != b)
    return f"from id {place} on, here {here[place : place + 5]} and there {there[place : place + 5]}"
