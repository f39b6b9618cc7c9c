"""Streams: told as they are sampled, in every dialect, and stored as far as they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from rollouts.gateway.endpoint import Limits
from rollouts.lifecycle import Fidelity
from rollouts.llm.scripted.server import ScriptedServer
from tests.unit.gateways import BASH, KEY, Gateway, calls, serve

REPLY = f"<think>\nwhere could it be?\n</think>\n\nI look for it now.\n{calls('ls')}\n{calls('pwd')}"
QUESTION = f"[[reply:{REPLY}]][[reply2:Found it.]]"
TOOLS = [{"type": "function", "function": BASH}]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with ScriptedServer() as server, serve(server) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_openai_chat(gateway, client):
    messages: list = [{"role": "user", "content": QUESTION}]
    ask = {"model": "m", "tools": TOOLS, "stream_options": {"include_usage": True}}
    pieces = 0
    async with client.chat.completions.stream(messages=messages, **ask) as stream:
        async for event in stream:
            pieces += event.type == "content.delta"
        answer = await stream.get_final_completion()
    message = answer.choices[0].message
    assert pieces > 1 and message.content == "I look for it now." and answer.choices[0].finish_reason == "tool_calls"
    assert [call.function.arguments for call in message.tool_calls] == ['{"command": "ls"}', '{"command": "pwd"}']
    assert answer.usage.prompt_tokens == gateway.memory.calls[0].prompt_tokens
    messages.append({"role": "assistant", "content": message.content, "tool_calls": message.to_dict()["tool_calls"]})
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls]
    said = [chunk async for chunk in await client.chat.completions.create(messages=messages, stream=True, **ask)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said if chunk.choices) == "Found it."
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT
    assert gateway.memory.calls[0].text == REPLY


async def test_openai_responses(gateway, client):
    tools = [{"type": "function", **BASH, "strict": False}]
    async with client.responses.stream(model="m", input=QUESTION, tools=tools) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text == "I look for it now." and answer.output[0].content[0].text == "where could it be?"
    items = [{"role": "user", "content": QUESTION}, *answer.output]
    items += [{"type": "function_call_output", "call_id": item.call_id, "output": "x"} for item in answer.output[2:]]
    async with client.responses.stream(model="m", input=items, tools=tools) as stream:
        assert (await stream.get_final_response()).output_text == "Found it."
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT


async def test_anthropic(gateway):
    tools = [{"name": "bash", "description": BASH["description"], "input_schema": BASH["parameters"]}]
    ask = {"model": "m", "max_tokens": 300, "tools": tools}
    messages: list = [{"role": "user", "content": QUESTION}]
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        async with client.messages.stream(messages=messages, **ask) as stream:
            text = [piece async for piece in stream.text_stream]
            answer = await stream.get_final_message()
        assert len(text) > 1 and "".join(text) == "I look for it now." and answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert answer.content[2].input == {"command": "ls"}
        assert answer.usage.input_tokens == gateway.memory.calls[0].prompt_tokens
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "x"} for block in answer.content[2:]]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        async with client.messages.stream(messages=messages, **ask) as stream:
            assert await stream.get_final_text() == "Found it."
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT


async def test_google(gateway):
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[types.FunctionDeclaration(**BASH)])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    async with httpx.AsyncClient() as http:
        client = genai.Client(api_key=KEY, http_options={"base_url": gateway.url, "httpx_async_client": http})
        stream = await client.aio.models.generate_content_stream(model="m", contents=QUESTION, config=config)
        chunks = [chunk async for chunk in stream]
        client.close()
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
    assert "".join(part.text for part in parts if part.text and not part.thought) == "I look for it now."
    assert "".join(part.text for part in parts if part.thought) == "where could it be?"
    assert [part.function_call.args["command"] for part in parts if part.function_call] == ["ls", "pwd"]
    assert chunks[-1].usage_metadata.prompt_token_count == gateway.memory.calls[0].prompt_tokens


async def test_several_choices_and_raw_completions(gateway, client):
    ask = {"model": "m", "messages": [{"role": "user", "content": "[[reply:one two]]"}]}
    told = {0: "", 1: ""}
    async for chunk in await client.chat.completions.create(n=2, stream=True, **ask):
        for choice in chunk.choices:
            told[choice.index] += choice.delta.content or ""
    assert told == {0: "one two", 1: "one two"}
    raw = [chunk.choices[0].text async for chunk in await client.completions.create(model="m", prompt="say it", stream=True)]
    assert "".join(raw).strip() == gateway.memory.calls[2].text.strip()
    gateway.memory.validated()


async def test_a_stop_string_is_not_told_not_even_half_of_it(gateway, client):
    ask = {"model": "m", "messages": [{"role": "user", "content": "[[reply:one STop STOP two]]"}], "stop": "STOP"}
    pieces = [chunk.choices[0].delta.content or "" async for chunk in await client.chat.completions.create(stream=True, **ask)]
    assert "".join(pieces) == "one STop "


async def test_the_first_words_come_before_the_last_are_sampled():
    async with ScriptedServer(token_delay=0.02) as server, serve(server) as gateway:
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)
        ask = {"model": "m", "messages": [{"role": "user", "content": f"[[reply:{'a word ' * 100}]]"}]}
        stream = await client.chat.completions.create(stream=True, **ask)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert server.running == 1 and gateway.memory.calls == []
        await stream.close()
        await client.close()
        await _until(lambda: gateway.memory.calls)
        call = gateway.memory.calls[0]
        assert call.finish_reason == "abort" and 0 < len(call.sampled_ids) < 100 and len(call.logprobs) == len(call.sampled_ids)
        await _until(lambda: server.running == 0)
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY) as again:
            await again.chat.completions.create(max_tokens=3, **ask)
        assert [c.opened_by for c in gateway.memory.calls] == ["start", "sibling"]
        gateway.memory.validated()


async def test_a_silent_stream_is_kept_alive():
    async with (
        ScriptedServer() as server,
        serve(server, Limits(keep_alive_seconds=0.05)) as gateway,
        httpx.AsyncClient() as http,
    ):
        body = {"messages": [{"role": "user", "content": "[[reply:one]][[delay:0.5]]"}], "stream": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=20)
    lines = answer.text.splitlines()
    assert lines[0] == ": still working" and lines[-2] == "data: [DONE]"


async def test_what_fails_before_the_first_word_has_a_status(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.chat.completions.create(model="m", stream=True, messages=[{"role": "user", "content": "long " * 9000}])


async def test_a_session_that_ends_tells_its_streams():
    ask = {"model": "m", "messages": [{"role": "user", "content": f"[[reply:{'a word ' * 100}]]"}]}
    async with (
        ScriptedServer(token_delay=0.02) as server,
        serve(server) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(stream=True, **ask)
        with pytest.raises(openai.APIError, match="the session has ended"):
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    closing = asyncio.create_task(gateway.session.close())
        await closing


async def _until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
