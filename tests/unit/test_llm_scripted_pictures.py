"""The scripted server shows its model pictures as vLLM does, and what it answers depends on them."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollouts.llm.scripted.script import Request
from rollouts.llm.scripted.server import ScriptedServer
from tests.unit.test_llm_scripted_answers import chunks, post, refusal

RED, BLUE = b"\x89PNG\r\n\x1a\n red", b"GIF89a blue"
RENDER, GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"


def says_what_it_sees(request: Request) -> str:
    return " and ".join(picture.decode("latin-1").split()[-1] for picture in request.pictures) or "nothing"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(script=says_what_it_sees, pictures=True, max_model_len=300) as server:
        yield server


@pytest.fixture
async def http(server: ScriptedServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def question(*pictures: bytes) -> list[dict[str, Any]]:
    """One user message: text, then each picture with text behind it."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
    for picture in pictures:
        parts += [{"type": "image_url", "image_url": {"url": url(picture)}}, {"type": "text", "text": " this."}]
    return [{"role": "user", "content": parts}]


async def render(http: aiohttp.ClientSession, *pictures: bytes) -> tuple[list[int], list[int]]:
    """The ids as the model sees them, and as they are sent: with the most frequent id of its place for each picture."""
    answer = await post(http, RENDER, messages=question(*pictures), mm_payload="none", add_special_tokens=False)
    ids, sent, at = answer["token_ids"], [], 0
    for place in answer["features"]["mm_placeholders"]["image"]:
        end = place["offset"] + place["length"]
        sent += [*ids[at : place["offset"]], Counter(ids[place["offset"] : end]).most_common(1)[0][0]]
        at = end
    return ids, sent + ids[at:]


def generating(ids: list[int], *pictures: bytes, **sampling: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "url": url(picture)} for picture in pictures]
    asked = {"max_tokens": 50, "temperature": 0, "logprobs": 0} | sampling
    return {"token_ids": ids, "content_parts": parts, "return_token_ids": True, "output_mode": "text", "sampling_params": asked}


async def test_a_render_tells_where_the_pictures_are(http, server):
    answer = await post(http, RENDER, messages=question(RED, BLUE), max_tokens=9)
    assert answer["token_ids"] == (await post(http, "/tokenize", messages=question(RED, BLUE)))["tokens"]
    assert server.rendered == 2
    first, second = answer["features"]["mm_placeholders"]["image"]
    assert first["length"] != second["length"]  # which the data decides
    assert len(set(answer["features"]["mm_hashes"]["image"])) == 2
    for place in (first, second):
        ids = answer["token_ids"][place["offset"] : place["offset"] + place["length"]]
        assert (ids[0], len(set(ids))) == (ids[-1], 2)
    assert answer["sampling_params"]["max_tokens"] == 9
    text = await post(http, RENDER, messages=[{"role": "user", "content": "Hi"}])
    assert (text["features"], text["sampling_params"]["max_tokens"]) == (None, 300 - len(text["token_ids"]))


async def test_what_was_rendered_is_what_the_model_gets(http):
    ids, sent = await render(http, RED, BLUE)
    whole = await post(http, GENERATE, **generating(sent, RED, BLUE))
    assert whole["prompt_token_ids"] == ids != sent
    assert len(whole["mm_placeholders"]["image"]) == 2
    assert (whole["choices"][0]["text"], whole["usage"]["prompt_tokens"]) == ("red and blue", len(ids))
    first, *others = await chunks(http, GENERATE, **generating(sent, RED, BLUE))
    assert (first["prompt_token_ids"], first["mm_placeholders"]) == (ids, whole["mm_placeholders"])
    assert not any("prompt_token_ids" in chunk for chunk in others)
    assert "".join(chunk["choices"][0]["text"] for chunk in (first, *others)) == "red and blue"
    chat = await post(http, "/v1/chat/completions", messages=question(RED, BLUE), return_token_ids=True, temperature=0)
    assert (chat["prompt_token_ids"], chat["choices"][0]["message"]["content"]) == (ids, "red and blue")


async def test_logprobs_depend_on_the_pictures_before(http):
    _, sent = await render(http, RED, BLUE)
    same, other = [
        (await post(http, GENERATE, **generating(sent, RED, picture, prompt_logprobs=0)))["prompt_logprobs"]
        for picture in (BLUE, BLUE[:-4] + b"gray")
    ]
    differ = [at for at, (one, two) in enumerate(zip(same, other, strict=False)) if one != two]
    places = (await post(http, RENDER, messages=question(RED, BLUE)))["features"]["mm_placeholders"]["image"]
    assert differ and differ[0] > places[1]["offset"]


async def test_a_recomputation_finds_what_was_sampled(http):
    _, sent = await render(http, RED)
    sampled = (await post(http, GENERATE, **generating(sent, RED)))["choices"][0]
    scored = await post(http, GENERATE, **generating(sent + sampled["token_ids"], RED, max_tokens=1, prompt_logprobs=0))
    stored = [entry["logprob"] for entry in sampled["logprobs"]["content"]]
    tail = scored["prompt_logprobs"][-len(stored) :]
    assert [entry[str(token)]["logprob"] for entry, token in zip(tail, sampled["token_ids"], strict=True)] == stored


async def test_a_server_can_lie(http, server):
    ids, sent = await render(http, RED)
    server.switches.expand_otherwise = True
    assert (await post(http, GENERATE, **generating(sent, RED)))["prompt_token_ids"] != ids


async def test_weights_loaded_without_a_pause_end_it_with_the_next_known_picture(http):
    """As vLLM's engine ends: its scheduler takes for known what its worker has forgotten."""
    _, sent = await render(http, RED)
    asked = generating(sent, RED)
    await post(http, GENERATE, **asked)
    for forget in ("/pause", "/reset_encoder_cache"):
        async with http.post(forget):
            await post(http, "/collective_rpc", method="reload_weights")
        async with http.post("/resume"):
            await post(http, GENERATE, **asked)
    await post(http, "/collective_rpc", method="reload_weights")
    assert (await refusal(http, GENERATE, **asked))[0] == 500


async def test_refusals_are_worded_as_vllms(http):
    _, sent = await render(http, RED)
    status, error = await refusal(http, GENERATE, **generating(sent, RED, BLUE))
    assert (status, error["message"]) == (500, "Failed to apply prompt replacement for mm_items['image'][1]")
    status, error = await refusal(http, GENERATE, **generating([65, 66], RED))
    assert (status, error["message"]) == (500, "Failed to apply prompt replacement for mm_items['image'][0]")
    status, error = await refusal(http, RENDER, messages=question(b"no picture"))
    assert (status, error["message"][:20]) == (400, "Failed to load image")
    away = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]}]
    status, error = await refusal(http, "/tokenize", messages=away)
    assert (status, error["message"][:14]) == (500, "Cannot connect")


async def test_a_model_without_eyes_refuses_pictures():
    async with ScriptedServer() as server, aiohttp.ClientSession(server.url) as http:
        for path in ("/tokenize", RENDER, "/v1/chat/completions"):
            status, error = await refusal(http, path, messages=question(RED))
            assert (status, error["message"]) == (400, "scripted is not a multimodal model")
        status, error = await refusal(http, GENERATE, **generating([65, 66], RED))
        assert (status, error["message"]) == (400, "scripted is not a multimodal model")
        assert (await post(http, GENERATE, **generating([65, 66])))["mm_placeholders"] is None
