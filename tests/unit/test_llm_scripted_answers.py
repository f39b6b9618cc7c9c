"""What the scripted server answers to each kind of generation request, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollouts.llm.scripted.server import ScriptedServer

QUESTION = [{"role": "user", "content": "[[reply:one two three]]"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(max_model_len=300) as server:
        yield server


@pytest.fixture
async def http(server: ScriptedServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    async with http.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def refusal(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) as response:
        return response.status, (await response.json())["error"]


async def chunks(http: aiohttp.ClientSession, path: str, **body: Any) -> list[dict[str, Any]]:
    async with http.post(path, json=body | {"stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *events, last, rest = (await response.text()).split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def rendered(http: aiohttp.ClientSession, text: str) -> list[int]:
    return (await post(http, "/tokenize", messages=[{"role": "user", "content": text}]))["tokens"]


async def test_a_streamed_completion_is_the_whole_one_in_pieces(http):
    asked = {"prompt": await rendered(http, "[[reply:ein Café für dich]]"), "max_tokens": 50, "temperature": 0}
    asked |= {"return_token_ids": True, "logprobs": 0}
    whole = (await post(http, "/v1/completions", **asked))["choices"][0]
    *streamed, usage = await chunks(http, "/v1/completions", **asked, stream_options={"include_usage": True})
    choices = [chunk["choices"][0] for chunk in streamed]
    assert [len(choice["token_ids"]) for choice in choices] == [1] * len(whole["token_ids"])
    assert [choice["token_ids"][0] for choice in choices] == whole["token_ids"]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in choices] == whole["logprobs"]["token_logprobs"]
    assert [choice["logprobs"]["text_offset"][0] for choice in choices] == whole["logprobs"]["text_offset"]
    assert "".join(choice["text"] for choice in choices) == whole["text"] == "ein Café für dich"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(choices))


async def test_a_streamed_chat_begins_with_the_role_and_the_prompts_ids(http):
    asked = {"messages": QUESTION, "return_token_ids": True, "logprobs": True, "temperature": 0}
    whole = await post(http, "/v1/chat/completions", **asked)
    opening, *streamed = await chunks(http, "/v1/chat/completions", **asked)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["prompt_token_ids"] == whole["prompt_token_ids"]
    choices = [chunk["choices"][0] for chunk in streamed]
    assert "".join(choice["delta"]["content"] for choice in choices) == "one two three"
    assert [id for choice in choices for id in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert choices[-1]["finish_reason"] == "stop"


async def test_a_stop_string_is_cut_from_a_stream_too(http):
    asked = {"prompt": "[[reply:ab STOP cd]]", "stop": ["STOP"], "max_tokens": 50}
    streamed = await chunks(http, "/v1/completions", **asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "ab "
    assert streamed[-1]["choices"][0]["stop_reason"] == "STOP"


async def test_generate_tells_which_weights_sampled_what(http):
    ids = await rendered(http, "[[reply:one two three]]")
    sampling = {"max_tokens": 50, "logprobs": 1, "temperature": 0}
    answer = await post(http, "/inference/v1/generate", token_ids=ids, sampling_params=sampling, output_mode="text")
    choice = answer["choices"][0]
    count = len(choice["token_ids"])
    assert choice["text"] == "one two three"
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
    assert [entry["top_logprobs"][0]["token"] for entry in choice["logprobs"]["content"]][-1] == "<|im_end|>"

    plain = await post(http, "/inference/v1/generate", token_ids=ids, sampling_params=sampling)
    assert "text" not in plain["choices"][0]
    entries = plain["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

    streamed = await chunks(http, "/inference/v1/generate", token_ids=ids, sampling_params=sampling)
    assert [chunk["choices"][0]["weight_versions"] for chunk in streamed] == [None] * (count - 1) + [choice["weight_versions"]]


async def test_prompt_logprobs_recompute_what_was_sampled(http):
    asked = {"prompt": await rendered(http, "[[reply:one two three]]"), "max_tokens": 50}
    choice = (await post(http, "/v1/completions", **asked, return_token_ids=True, logprobs=0))["choices"][0]
    whole = asked["prompt"] + choice["token_ids"]
    scored = await post(http, "/v1/completions", prompt=whole, max_tokens=1, prompt_logprobs=0)
    entries = scored["choices"][0]["prompt_logprobs"][len(asked["prompt"]) :]
    found = [entry[str(token)]["logprob"] for token, entry in zip(choice["token_ids"], entries, strict=True)]
    assert found == choice["logprobs"]["token_logprobs"]


async def test_several_choices_and_seeds(http):
    asked = {"prompt": await rendered(http, "[[reply:" + "the other answer " * 5 + "]]"), "max_tokens": 90}
    asked |= {"n": 3, "return_token_ids": True}
    one = await post(http, "/v1/completions", **asked, seed=7)
    same = await post(http, "/v1/completions", **asked, seed=7)
    other = await post(http, "/v1/completions", **asked, seed=8)
    ids = [[choice["token_ids"] for choice in answer["choices"]] for answer in (one, same, other)]
    assert ids[0] == ids[1] != ids[2]
    assert len({tuple(choice) for choice in ids[0]}) == 3
    assert one["usage"]["completion_tokens"] == sum(map(len, ids[0]))


async def test_a_prompt_that_ends_within_a_reply_is_continued(http):
    prompt = await rendered(http, "[[reply:one two three]]")
    cut = (await post(http, "/v1/completions", prompt=prompt, max_tokens=3, return_token_ids=True))["choices"][0]
    assert cut["finish_reason"] == "length"
    rest = (await post(http, "/v1/completions", prompt=prompt + cut["token_ids"], max_tokens=50))["choices"][0]
    assert cut["text"] + rest["text"] == "one two three"


async def test_tools_are_rendered_and_calls_parsed(http):
    messages = [
        {"role": "user", "content": f"[[reply:Let me see. {CALL}]]"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    ids = (await post(http, "/tokenize", messages=messages, tools=[TOOL]))["tokens"]
    text = (await post(http, "/detokenize", tokens=ids))["prompt"]
    assert '<tools>\n{"type": "function"' in text
    assert 'assistant\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>' in text

    asked = {"messages": messages[:1], "tools": [TOOL]}
    choice = (await post(http, "/v1/chat/completions", **asked))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    last = (await chunks(http, "/v1/chat/completions", **asked))[-1]["choices"][0]
    assert (last["finish_reason"], last["delta"]["tool_calls"][0]["function"]["name"]) == ("tool_calls", "f")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            {"prompt": [65] * 400, "max_tokens": 5},
            400,
            "This model's maximum context length is 300 tokens. However, your prompt",
        ),
        ({"prompt": [65] * 300, "max_tokens": 5}, 400, "max_tokens must be at least 1, got 0"),
        ({"prompt": [65], "max_tokens": 301}, 400, "max_tokens=301 cannot be greater than max_model_len=300"),
        ({"prompt": [65], "model": "another"}, 404, "The model `another` does not exist"),
        ({"prompt": [65], "n": "two"}, 400, "n must be a whole number"),
    ],
)
async def test_refusals_are_worded_as_vllms(http, body, status, message):
    got, error = await refusal(http, "/v1/completions", **body)
    assert (got, error["code"]) == (status, status)
    assert error["message"].startswith(message)


async def test_a_reply_is_cut_where_the_context_ends(http):
    answer = await post(http, "/v1/completions", prompt=[65] * 298, max_tokens=50)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["total_tokens"]) == ("length", 300)


async def test_flaws_are_switched_on(http, server):
    server.switches.flaw = "omit_logprob"
    choice = (await post(http, "/v1/completions", prompt="[[reply:one two three]]", logprobs=0))["choices"][0]
    assert choice["logprobs"]["token_logprobs"].count(None) == 1
    server.switches.broken = True
    async with http.get("/health") as response:
        assert response.status == 200
    status, error = await refusal(http, "/v1/completions", prompt="x")
    assert (status, error["type"]) == (500, "InternalServerError")


async def test_what_a_server_does_not_offer_is_not_there():
    async with ScriptedServer(without=["/pause"]) as server, aiohttp.ClientSession(server.url) as http:
        async with http.post("/pause") as response:
            assert response.status == 404
        async with http.post("/resume") as response:
            assert response.status == 200
