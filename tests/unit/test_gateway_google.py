"""Google's own client against the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from google import genai
from google.genai import errors, types

from rollouts.lifecycle import Fidelity
from rollouts.llm.scripted.server import ScriptedServer
from tests.unit.gateways import BASH, KEY, Gateway, calls, serve

TOOLS = [types.Tool(function_declarations=[types.FunctionDeclaration(**BASH)])]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with ScriptedServer() as server, serve(server) as gateway:
        yield gateway


@pytest.fixture
async def models(gateway: Gateway) -> AsyncIterator[genai.models.AsyncModels]:
    async with httpx.AsyncClient() as http:
        client = genai.Client(api_key=KEY, http_options={"base_url": gateway.url, "httpx_async_client": http})
        yield client.aio.models
        client.close()


def user(*parts: types.Part) -> types.Content:
    return types.Content(role="user", parts=list(parts))


def config(**more) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True), **more)


async def test_a_tool_loop_is_one_exact_sequence(gateway, models):
    contents = [user(types.Part(text=f"[[reply:I look.{calls('ls')}{calls('pwd')}]][[reply2:Found it.]]"))]
    options = config(tools=TOOLS, system_instruction="Be brief.", max_output_tokens=300, temperature=0.5)
    answer = await models.generate_content(model="any", contents=contents, config=options)
    assert [call.args for call in answer.function_calls] == [{"command": "ls"}, {"command": "pwd"}]
    assert answer.usage_metadata.prompt_token_count == gateway.memory.calls[0].prompt_tokens
    results = [types.Part.from_function_response(name="bash", response={"output": text}) for text in ("a b", "/")]
    contents += [answer.candidates[0].content, user(*results)]
    answer = await models.generate_content(model="any", contents=contents, config=options)
    assert answer.text == "Found it." and answer.candidates[0].finish_reason == types.FinishReason.STOP
    assert gateway.memory.validated().fidelity is Fidelity.TOKEN_EXACT
    assert [(c.arguments["command"], c.output) for c in gateway.memory.tool_calls] == [("ls", "a b"), ("pwd", "/")]
    assert gateway.memory.calls[0].sampling["temperature"] == 0.5


async def test_candidates_tokens_and_models(gateway, models):
    counted = await models.count_tokens(model="m", contents="hello")
    answer = await models.generate_content(
        model="m", contents="hello", config=config(candidate_count=2, stop_sequences=["END"], max_output_tokens=3)
    )
    assert len(answer.candidates) == 2 and counted.total_tokens == answer.usage_metadata.prompt_token_count
    assert len(gateway.memory.validated().segments) == 2
    assert [model.name async for model in await models.list()] == ["models/policy"]


async def test_refusals_have_its_shape(gateway, models):
    with pytest.raises(errors.ClientError, match="exceeds the maximum number of tokens") as caught:
        await models.generate_content(model="m", contents="long " * 9000)
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    with pytest.raises(errors.ClientError, match=r"contents\.0\.parts\.0\.inlineData"):
        await models.generate_content(model="m", contents=types.Part.from_bytes(data=b"x", mime_type="image/png"))
    with pytest.raises(errors.ClientError, match=r"generationConfig\.responseSchema"):
        await models.generate_content(model="m", contents="hi", config=config(response_schema={"type": "STRING"}))
