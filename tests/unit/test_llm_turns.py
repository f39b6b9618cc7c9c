"""What follows a sampled reply, for templates that look at tools, calls and reasoning."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ModelError
from rollouts.llm.types import ChatMessage, ServerAddress
from tests.unit.chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, STYLES, PlainRenderer, Tokenizing, train

TOKENIZER = train("byte_pairs")
SERVER = ServerAddress("http://server", "m", "p", 0, 10_000)
TOOLS = [{"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}]
QUESTION: ChatMessage = {"role": "user", "content": "the other"}

# Results are named by their calls, and refused without one.
NAMING = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- set calls = messages[loop.index0 - 1].tool_calls %}
        {%- if not calls %}{{ raise_exception('no call before this result') }}{% endif %}
        {{- '<|im_start|>' + calls[0].function.name + ' to assistant\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}{{ '[' + call.function.name + ']' }}{% endfor %}
        {{- '<|call|>' if message.tool_calls and special_end else '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


class Told:
    """A client of a server that only renders, with this template."""

    def __init__(self, source: str) -> None:
        self.server = Tokenizing(PlainRenderer(source, TOKENIZER))
        self.turns = ModelClient(self.server).turns

    async def continuation(self, reply: ChatMessage, *new: ChatMessage, end: str = "<|im_end|>", **options: Any) -> str | None:
        told = await self.turns.continuation(SERVER, TOKENIZER.token_to_id(end), [QUESTION, reply], new, **options)
        return None if told is None else TOKENIZER.decode(told.ids, skip_special_tokens=False)


def said(text: str, *names: str, reasoning: str = "") -> ChatMessage:
    message = ChatMessage(role="assistant", content=text)
    if names:
        message["tool_calls"] = [
            {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}
            for number, name in enumerate(names)
        ]
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def result(text: str, number: int = 0) -> ChatMessage:
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05}"}


@pytest.mark.parametrize(
    ("name", "shows"), [("chatml", False), ("gemma", False), ("qwen3", True), ("llama3", True), ("mistral", True)]
)
async def test_whether_a_template_shows_tools(name, shows):
    assert await Told(STYLES[name].source).turns.shows_tools(SERVER, TOOLS) is shows


async def test_parallel_results_stand_together():
    told = await Told(QWEN3).continuation(said("", "run", "run"), result("a"), result("b", 1), QUESTION, tools=TOOLS)
    responses = "\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
    assert told == f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>user\nthe other<|im_end|>\n<|im_start|>assistant\n"


async def test_tools_stand_before_and_are_not_repeated():
    told = await Told(LLAMA3).continuation(said("", "run"), result("a"), tools=TOOLS, end="<|eot_id|>")
    assert (
        told == '<|start_header_id|>ipython<|end_header_id|>\n\n"a"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )


async def test_tools_that_move_to_the_last_question_begin_a_segment():
    client = Told(MISTRAL)
    assert await client.continuation(said("one"), QUESTION, tools=TOOLS, end="</s>") is None
    assert await client.continuation(said("one"), QUESTION, end="</s>") == "[INST] the other[/INST]"
    told = await client.continuation(said("", "run"), result("a"), tools=TOOLS, end="</s>")
    assert told == '[TOOL_RESULTS] {"content": "a", "call_id": "call00000"}[/TOOL_RESULTS]'


@pytest.mark.parametrize("reply", [said("<think>\nhm\n</think>\n\none", "run"), said("one", "run", reasoning="hm")])
async def test_reasoning_lasts_until_the_next_question(reply):
    client = Told(QWEN3)
    assert await client.continuation(reply, result("a"), tools=TOOLS)
    assert await client.continuation(reply, result("a"), QUESTION, tools=TOOLS) is None


async def test_reasoning_that_a_template_does_not_know_begins_a_segment():
    assert await Told(CHATML).continuation(said("one", reasoning="hm"), QUESTION) is None


async def test_results_are_named_by_their_calls():
    told = await Told(NAMING).continuation(said("", "look_up"), result("a"))
    assert told == "\n<|im_start|>look_up to assistant\na<|im_end|>\n<|im_start|>assistant\n"


async def test_a_refusal_after_the_fixed_conversation_begins_a_segment():
    assert await Told(NAMING).continuation(said("one"), result("a")) is None
    assert await Told(GEMMA).continuation(said("one"), said("two"), end="<end_of_turn>") is None


async def test_calls_that_end_in_another_way_begin_a_segment():
    told = await Told(NAMING).continuation(said("", "run"), result("a"), template_kwargs={"special_end": True})
    assert told is None


async def test_a_reply_that_did_not_end_its_turn_begins_a_segment():
    assert await Told(CHATML).continuation(said("one"), QUESTION, end="</s>") is None


async def test_the_template_is_told_what_the_caller_says():
    told = await Told(QWEN3).continuation(said("one"), QUESTION, template_kwargs={"enable_thinking": False})
    assert told is not None
    assert told.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


async def test_the_order_of_a_tools_fields_matters():
    """Templates write tools as JSON in the order that they come in."""
    other = [{"function": TOOLS[0]["function"], "type": "function"}]
    client = Told("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<|im_end|>" + CHATML)
    assert await client.continuation(said("one"), QUESTION, tools=TOOLS)
    rendered = client.server.rendered
    assert await client.continuation(said("one"), QUESTION, tools=other)
    assert client.server.rendered - rendered == 3


async def test_a_turn_costs_one_render_and_one_more_after_calls():
    client = Told(QWEN3)
    await client.continuation(said("one"), QUESTION, tools=TOOLS)
    rendered = client.server.rendered
    await asyncio.gather(*(client.continuation(said("one"), QUESTION, tools=TOOLS) for _ in range(10)))
    assert client.server.rendered - rendered == 10
    await client.continuation(said("", "run"), result("a"), tools=TOOLS)
    assert client.server.rendered - rendered == 12


async def test_a_server_that_fails_is_not_a_template_that_refuses():
    class Broken(Tokenizing):
        async def request(self, *args: Any, **options: Any) -> dict[str, Any]:
            raise ModelError("no", retryable=True, status=503)

    turns = ModelClient(Broken(PlainRenderer(CHATML, TOKENIZER))).turns
    with pytest.raises(ModelError, match="no"):
        await turns.continuation(SERVER, 1, [QUESTION, said("one")], [QUESTION])
