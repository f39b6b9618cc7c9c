"""Anthropic's own client against the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import pytest

from rollouts.lifecycle import Fidelity
from rollouts.llm.scripted.server import ScriptedServer
from tests.unit.gateways import BASH, KEY, Gateway, calls, serve

TOOLS = [{"name": "bash", "description": BASH["description"], "input_schema": BASH["parameters"]}]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with ScriptedServer() as server, serve(server) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        yield client


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def result(block, text: str) -> dict:
    return {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": text}]}


async def test_a_tool_loop_is_one_exact_sequence(gateway, client):
    messages = [user(f"[[reply:<think>\nwhere?\n</think>\n\nI look.{calls('ls')}{calls('pwd')}]][[reply2:Found it.]]")]
    ask = {"model": "any", "max_tokens": 200, "system": "Be brief.", "tools": TOOLS}
    answer = await client.messages.create(messages=messages, **ask)
    assert answer.stop_reason == "tool_use" and answer.usage.input_tokens == gateway.memory.calls[0].prompt_tokens
    thought, said, first, second = answer.content
    assert (thought.thinking, said.text, first.input, second.input) == (
        *("where?", "I look."),
        *({"command": "ls"}, {"command": "pwd"}),
    )
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result(first, "a b"), result(second, "/"), {"type": "text", "text": "Go on."}]},
    ]
    answer = await client.messages.create(messages=messages, **ask)
    assert (answer.content[0].text, answer.stop_reason) == ("Found it.", "end_turn")
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT
    assert [(c.arguments["command"], c.output) for c in gateway.memory.tool_calls] == [("ls", "a b"), ("pwd", "/")]
    assert [m.role for m in gateway.memory.messages] == [
        *["system", "user", "assistant", "tool", "tool", "user", "assistant"],
    ]


async def test_why_a_reply_ended(client):
    cut = await client.messages.create(model="m", max_tokens=2, messages=[user("[[reply:one two three four]]")])
    assert cut.stop_reason == "max_tokens"
    stopped = await client.messages.create(
        model="m", max_tokens=50, messages=[user("[[reply:one END two]]")], stop_sequences=["END"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "END", "one ")


async def test_tokens_are_counted_as_they_would_be_sent(gateway, client):
    ask = {"model": "m", "messages": [user("hello")], "tools": TOOLS}
    counted = await client.messages.count_tokens(**ask)
    answer = await client.messages.create(max_tokens=5, **ask)
    assert counted.input_tokens == answer.usage.input_tokens
    assert gateway.memory.calls[0].opened_by == "start"  # counting leaves no trace


async def test_refusals_have_its_shape(client):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught:
        await client.messages.create(model="m", max_tokens=5, messages=[user("long " * 9000)])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0\.source\.data"):
        await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": [picture]}])
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="another").messages.create(model="m", max_tokens=5, messages=[user("hi")])


async def test_models_lists_the_sessions_model(client):
    assert [model.id async for model in client.models.list()] == ["policy"]
