"""OpenAI's own client against the gateway: responses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from rollouts.lifecycle import Fidelity
from rollouts.llm.scripted.server import ScriptedServer
from tests.unit.gateways import BASH, KEY, Gateway, calls, serve

TOOLS = [{"type": "function", **BASH, "strict": False}]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with ScriptedServer() as server, serve(server) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_a_tool_loop_is_one_exact_sequence(gateway, client):
    question = f"[[reply:<think>\nwhere?\n</think>\n\nI look.{calls('ls')}{calls('pwd')}]][[reply2:Found it.]]"
    items: list = [{"role": "user", "content": question}]
    ask = {"model": "any", "instructions": "Be brief.", "tools": TOOLS, "max_output_tokens": 300}
    answer = await client.responses.create(input=items, **ask)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.status == "completed" and answer.usage.input_tokens == gateway.memory.calls[0].prompt_tokens
    items += answer.output
    outputs = iter(["a b", "/"])
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": next(outputs)}
        for item in answer.output
        if item.type == "function_call"
    ]
    answer = await client.responses.create(input=items, **ask)
    assert answer.output_text == "Found it."
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT
    assert [(c.arguments["command"], c.output) for c in gateway.memory.tool_calls] == [("ls", "a b"), ("pwd", "/")]


async def test_a_response_can_be_gone_on_from_by_its_id(gateway, client):
    first = await client.responses.create(model="m", input="[[reply:one]][[reply2:two]]", instructions="Be brief.")
    second = await client.responses.create(
        model="m", input="more", previous_response_id=first.id, instructions="Be brief.", store=False
    )
    assert second.output_text == "two"
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(model="m", input="more", previous_response_id="resp_none")


async def test_a_reply_that_was_cut_is_incomplete(client):
    answer = await client.responses.create(model="m", input="[[reply:one two three four]]", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("truncation", "auto"),
        ("conversation", "conv_1"),
        ("tools", [{"type": "web_search"}]),
        ("text", {"format": {"type": "json_object"}}),
        ("input", [{"type": "item_reference", "id": "x"}]),
    ],
)
async def test_what_would_be_ignored_is_refused_by_name(client, field, value):
    with pytest.raises(openai.BadRequestError, match=field):
        await client.responses.create(**{"model": "m", "input": "hi", field: value})
