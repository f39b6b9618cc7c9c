"""OpenAI's own client against the gateway: chat completions and raw completions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from rollouts.lifecycle import Fidelity
from rollouts.llm.scripted.server import ScriptedServer
from tests.unit.gateways import BASH, KEY, Gateway, calls, serve

TOOLS = [{"type": "function", "function": BASH}]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with ScriptedServer() as server, serve(server) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def test_a_tool_loop_is_one_exact_sequence(gateway, client):
    messages = [user(f"[[reply:I look.\n{calls('ls')}]][[reply2:{calls('cat a')}{calls('cat b')}]][[reply3:It says ab.]]")]
    outputs = iter(["a b", "A", "B"])
    while True:
        answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        assert answer.choices[0].finish_reason == "tool_calls"
        messages += [{"role": "tool", "tool_call_id": c.id, "content": next(outputs)} for c in message.tool_calls]
    assert message.content == "It says ab." and answer.model == "any"
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT
    assert [call.dialect for call in gateway.memory.calls] == ["openai-chat"] * 3
    assert all(call.logprobs and call.sampled_ids for call in gateway.memory.calls)
    assert answer.usage.prompt_tokens == gateway.memory.calls[-1].prompt_tokens
    assert [(c.turn, c.index, c.arguments["command"], c.output) for c in gateway.memory.tool_calls] == [
        (0, 0, "ls", "a b"),
        (1, 0, "cat a", "A"),
        (1, 1, "cat b", "B"),
    ]
    assert [(m.role, m.turn) for m in gateway.memory.messages] == [
        *[("user", 0), ("assistant", 0), ("tool", 0), ("assistant", 1), ("tool", 1), ("tool", 1), ("assistant", 2)]
    ]


async def test_the_callers_sampling_is_used_and_stored(gateway, client):
    answer = await client.chat.completions.create(
        model="m", messages=[user("[[reply:one two three four]]")], max_tokens=2, temperature=0.5, top_p=0.9, seed=3
    )
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2
    stored = gateway.memory.calls[0].sampling
    assert (stored["max_tokens"], stored["temperature"], stored["top_p"], stored["seed"]) == (2, 0.5, 0.9, 3)


async def test_the_stop_string_is_not_told_but_stored(gateway, client):
    answer = await client.chat.completions.create(model="m", messages=[user("[[reply:one END two]]")], stop=["END"])
    assert answer.choices[0].message.content == "one " and answer.choices[0].finish_reason == "stop"
    assert gateway.memory.calls[0].text == "one END"


async def test_several_choices_share_a_prompt_and_are_siblings(gateway, client):
    answer = await client.chat.completions.create(model="m", messages=[user("[[reply:hello there]]")], n=3, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    buffer = gateway.memory.validated()
    assert len(buffer.segments) == 3 and len({tuple(prompt) for prompt in gateway.memory.prompts}) == 1
    assert [(c.opened_by, c.parent_segment) for c in gateway.memory.calls] == [("start", None), ("sibling", 0), ("sibling", 0)]
    assert [m.role for m in gateway.memory.messages] == ["user", "assistant", "assistant", "assistant"]
    told = [[entry.logprob for entry in choice.logprobs.content] for choice in answer.choices]
    assert sorted(told) == sorted(call.logprobs for call in gateway.memory.calls)


async def test_reasoning_is_told_apart_and_kept_although_the_agent_drops_it(gateway, client):
    messages = [user("[[reply:<think>\nhm, well\n</think>\n\nYes.]][[reply2:Bye.]]")]
    message = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "hm, well")
    await client.chat.completions.create(model="m", messages=[*messages, {"role": "assistant", "content": "Yes."}, user("ok")])
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT


async def test_content_may_come_in_parts_and_systems_may_be_developers(gateway, client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    await client.chat.completions.create(model="m", messages=messages)
    assert [(m.role, m.content) for m in gateway.memory.messages[:2]] == [("system", "Be brief."), ("user", "a\nb")]


async def test_only_the_first_call_is_given_where_parallel_calls_are_unwanted(gateway, client):
    messages = [user(f"[[reply:{calls('a')}{calls('b')}]][[reply2:done]]")]
    ask = {"model": "m", "tools": TOOLS, "parallel_tool_calls": False}
    message = (await client.chat.completions.create(messages=messages, **ask)).choices[0].message
    assert len(message.tool_calls) == 1
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "A"},
    ]
    await client.chat.completions.create(messages=messages, **ask)
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT


async def test_a_call_that_cannot_be_read_is_text(gateway, client):
    text = "<tool_call>\n{broken}\n</tool_call>"
    message = (await client.chat.completions.create(model="m", messages=[user(f"[[reply:{text}]]")], tools=TOOLS)).choices[0]
    assert message.finish_reason == "stop" and message.message.content == text


@pytest.mark.parametrize("value", ["1e999", "1" + "0" * 30, '{"a":' * 300 + "1" + "}" * 300, '"\\ud800"'])
async def test_calls_that_not_everybody_could_read_are_text(gateway, client, value):
    text = f'<tool_call>{{"name": "bash", "arguments": {{"command": {value}}}}}</tool_call>'
    answer = await client.chat.completions.create(model="m", messages=[user(f"[[reply:{text}]]")], tools=TOOLS, max_tokens=4000)
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (text, None)
    sent = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": f'{{"command": {value}}}'}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [sent]},
        {"role": "tool", "content": "", "tool_call_id": "a"},
    ]
    messages = [{"role": "user", "content": "Go on."}, *history]
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert answer.choices[0].finish_reason == "stop"


async def test_raw_prompts_go_on_from_the_ids_they_begin_with(gateway, client):
    first = await client.completions.create(model="m", prompt=[300, 301, 302], max_tokens=5, logprobs=1)
    sampled = gateway.memory.calls[0].sampled_ids
    assert first.choices[0].logprobs.token_logprobs == gateway.memory.calls[0].logprobs
    await client.completions.create(model="m", prompt=[300, 301, 302, *sampled, 303], max_tokens=5)
    await client.completions.create(model="m", prompt="something else", max_tokens=5)
    assert [(c.segment, c.opened_by) for c in gateway.memory.calls] == [(0, "start"), (0, ""), (1, "subagent")]
    assert gateway.memory.calls[1].context_ids == [303]
    assert gateway.memory.messages[-2].content == "something else"
    gateway.memory.validated()


async def test_models_lists_the_sessions_model(gateway, client):
    assert [model.id async for model in await client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).id == "policy"
