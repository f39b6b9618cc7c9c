"""Pictures with a real vLLM (a tiny random model that sees): what is stored is what the model saw and sampled.

One file, because its tests share one server, which only they need.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest

from prorl_site.embedded.vllm import VllmUnavailable
from rollouts.client import Client
from rollouts.lifecycle import Fidelity
from rollouts.llm.buffer import Segment, validate
from rollouts.llm.capabilities import Capabilities, Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.engines.control import Control
from rollouts.llm.messages import data_url, pictures_in
from rollouts.llm.pictures import picture_message
from rollouts.llm.placed import collapsed, content_parts
from rollouts.llm.probe import probe
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.transport import Transport
from rollouts.llm.types import ModelCallRecord, PlacedPicture, Sampling, ServerAddress, TokenPrompt
from sandboxes.protocol import Picture
from tests.acceptance.platform import ISSUE_KEY, install_environments, running_platform
from tests.acceptance.shapes import ask, compare, same_shapes
from tests.pictures import png
from tests.services.vllm import VISION_MODEL_FILES, other_eyes, start_tiny_vision_vllm
from tests.unit.gateways import KEY, serve

GENERATE = "/inference/v1/generate"
MODEL = VISION_MODEL_FILES.name
TOLERANCE = 1e-3  # of logprobs: the same sums in another order
SQUARE, WIDE, TALL = png(60, 60, (255, 0, 0)), png(120, 40, (0, 0, 255)), png(40, 120, (0, 200, 0))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    try:
        server = start_tiny_vision_vllm()
    except VllmUnavailable as error:
        pytest.skip(f"vLLM: {error}")
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def found(url: str) -> Capabilities:
    return asyncio.run(probe(url, tokenizer=str(VISION_MODEL_FILES)))  # which proves the renders of text equal, too


@pytest.fixture
def address(url: str, found: Capabilities) -> ServerAddress:
    return ServerAddress(
        url,
        MODEL,
        "policy",
        7,
        2048,
        features=found.features - {Feature.WEIGHT_VERSION},  # nobody has told it that its weights are version 7
        tokenizer=str(VISION_MODEL_FILES),
        picture_id=found.picture_id,
    )


@pytest.fixture
async def client() -> AsyncIterator[ModelClient]:
    client = ModelClient()
    yield client
    await client.close()


def test_the_probe_finds_that_it_sees(url: str, found: Capabilities):
    assert found.features == set(Feature) - {Feature.LORA}
    spelled = {"model": MODEL, "prompt": "<image>", "add_special_tokens": False}
    assert [found.picture_id] == httpx.post(f"{url}/tokenize", json=spelled).json()["tokens"]


async def test_a_render_is_what_the_server_tokenizes(url: str, address: ServerAddress, client: ModelClient):
    message = picture_message("Which is larger?", SQUARE, WIDE, TALL)
    prompt = await client.render(address, [message], add_generation_prompt=True)
    shown = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in (SQUARE, WIDE, TALL)]
    asked = {"role": "user", "content": [{"type": "text", "text": "Which is larger?"}, *shown]}
    body = {"model": MODEL, "messages": [asked], "add_generation_prompt": True, "add_special_tokens": False}
    assert prompt.ids == httpx.post(f"{url}/tokenize", json=body).json()["tokens"]
    assert [place.digest for place in prompt.placed] == [SQUARE.digest, WIDE.digest, TALL.digest]
    assert len({place.length for place in prompt.placed}) > 1  # shapes become different numbers of ids


class Stored(NamedTuple):
    """A segment as it is kept; `mask` and `logprobs` have an entry for each id."""

    prompt: TokenPrompt
    mask: list[int]
    logprobs: list[float]


def kept(segment: Segment) -> Stored:
    assert segment.logprobs is not None
    return Stored(TokenPrompt(segment.ids, tuple(segment.placed)), segment.mask, segment.logprobs)


async def wrong_logprobs(server: ServerAddress, stored: Stored, pictures: Mapping[str, Picture]) -> list[int]:
    """vLLM scores the stored sequence as a prompt with these pictures; the sampled positions where it finds other logprobs."""
    assert server.picture_id is not None
    body = {
        "model": MODEL,
        "token_ids": collapsed(stored.prompt, server.picture_id),
        "content_parts": content_parts(stored.prompt, pictures),
        "return_token_ids": True,
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0},
    }
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        answer = (await http.post(GENERATE, json=body)).raise_for_status().json()
    assert answer["prompt_token_ids"] == stored.prompt.ids
    columns = stored.prompt.ids, stored.mask, stored.logprobs, answer["prompt_logprobs"]
    return [
        at
        for at, (token, sampled, logprob, entry) in enumerate(zip(*columns, strict=True))
        if sampled and not math.isclose(entry[str(token)]["logprob"], logprob, abs_tol=TOLERANCE)
    ]


async def test_a_conversation_with_pictures_is_exact(address: ServerAddress, client: ModelClient):
    """Of users and of tools; what was sampled before a picture came has the same probabilities as with what came after."""
    conversation = Conversation(client, FixedRoute(address), Sampling(max_tokens=60, seed=1), call_timeout=60)
    turns = [
        picture_message("What is this?", SQUARE),
        picture_message("And these?", WIDE, TALL, SQUARE),
        {"role": "user", "content": "No picture this time."},
        picture_message("Here is a screenshot.", WIDE, role="tool"),
    ]
    calls = []
    for number, message in enumerate(turns):
        conversation.append(message)
        calls.append(await conversation.sample(number))
    buffer = validate(calls)
    assert [place.digest for place in calls[0].placed] == [SQUARE.digest]
    # A reply that was cut is not gone on from; nor is one with the id of a picture, which the model rarely samples.
    broken = any(call.finish_reason == "length" or address.picture_id in call.sampled_ids for call in calls[:-1])
    assert buffer.fidelity == conversation.fidelity == (Fidelity.SEGMENTED if broken else Fidelity.TOKEN_EXACT)
    pictures = pictures_in(turns)
    for segment in buffer.segments:
        assert sum(segment.mask) > 0
        assert await wrong_logprobs(address, kept(segment), pictures) == []


async def test_the_model_sees_the_picture_and_not_only_its_ids(address: ServerAddress, client: ModelClient):
    other = png(60, 60, (0, 255, 120))
    conversation = Conversation(client, FixedRoute(address), Sampling(max_tokens=60, seed=1), call_timeout=60)
    conversation.append(picture_message("What is this?", SQUARE))
    [segment] = validate([await conversation.sample(0)]).segments
    wrong = await wrong_logprobs(address, kept(segment), {SQUARE.digest: other})
    assert len(wrong) > sum(segment.mask) // 2


def test_rollouts_on_a_platform_are_exact(tmp_path: Path, address: ServerAddress):
    """A trainer gets the ids, where the pictures are among them, and the pictures: enough to compute the same logprobs."""
    shown = [base64.b64encode(picture.data).decode() for picture in (TALL, SQUARE, WIDE)]
    with running_platform(tmp_path / "var") as platform:
        install_environments(platform, tmp_path, talk="tests.acceptance.talk_environment:Talk")
        platform.start_execution(concurrency=4)
        with Client(platform.start_web(), platform.shell(ISSUE_KEY)) as client:
            server = client.register_server(address.url, policy="eyes", capacity=4)
            assert "pictures" in server["features"]
            client.create_environment("talk", handler="talk")
            run = client.create_run("seen", policy="eyes", settings={"sampling": {"max_tokens": 60}})
            client.submit_groups(run["id"], [{"n": 4, "environment": "talk", "payload": {"pictures": shown}}])
            results = list(client.iter_results(run["id"], include="trajectory"))
            assert [rollout["state"] for rollout in results] == ["succeeded"] * 4
            for rollout in results:
                assert rollout["trajectory"]["token_problem"] == ""
                for segment in rollout["trajectory"]["segments"]:
                    places = [PlacedPicture(at["offset"], at["length"], at["sha256"]) for at in segment["pictures"]]
                    data = {place.digest: Picture("image/png", client.picture(rollout["id"], place.digest)) for place in places}
                    stored = Stored(TokenPrompt(segment["token_ids"], tuple(places)), segment["loss_mask"], segment["logprobs"])
                    assert asyncio.run(wrong_logprobs(address, stored, data)) == []
                assert segment["pictures"][-1]["sha256"] == WIDE.digest


async def test_official_clients_send_pictures_through_the_gateway(address: ServerAddress):
    route = FixedRoute(address)
    async with serve(None, route=route, sampling=Sampling(max_tokens=30)) as gateway:  # type: ignore[arg-type]
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as agent:
            seen = {"type": "image_url", "image_url": {"url": data_url(SQUARE)}}
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, seen]}]
            first = await agent.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": first.choices[0].message.content})
            more = {"type": "image_url", "image_url": {"url": data_url(TALL)}}
            messages.append({"role": "user", "content": [more, {"type": "text", "text": "And this?"}]})
            stream = await agent.chat.completions.create(model="policy", messages=messages, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert gateway.memory.calls[-1].text == "".join(pieces)
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as other:
            kind, _, data = data_url(WIDE).removeprefix("data:").partition(";base64,")
            source = {"type": "base64", "media_type": kind, "data": data}
            said: list[Any] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
            answer = await other.messages.create(model="policy", max_tokens=20, messages=said)
            assert gateway.memory.calls[-1].text == "".join(block.text for block in answer.content if block.type == "text")
        assert [placed(call)[-1].digest for call in gateway.memory.calls] == [SQUARE.digest, TALL.digest, WIDE.digest]
        for segment in gateway.memory.validated().segments:
            shown = {picture.digest: picture for picture in (SQUARE, TALL, WIDE)}
            assert await wrong_logprobs(address, kept(segment), shown) == []


def placed(call: ModelCallRecord) -> tuple[PlacedPicture, ...]:
    assert call.logprobs is not None and len(call.logprobs) == len(call.sampled_ids) > 0
    return call.placed


async def test_new_weights_see_known_pictures_anew(address: ServerAddress, client: ModelClient, tmp_path: Path):
    """Loaded beside the platform, as trainers do. Without the last step vLLM's engine would end with the next picture."""
    conversation = Conversation(client, FixedRoute(address), Sampling(max_tokens=60, seed=1), call_timeout=60)
    conversation.append(picture_message("What is this?", SQUARE))
    [segment] = validate([await conversation.sample(0)]).segments
    transport = Transport()
    control = Control(transport, address)
    wrong = []
    for weights in (other_eyes(tmp_path / "other"), VISION_MODEL_FILES):
        await control.reload(str(weights), timeout=60)
        await control.reset_prefix_cache(recompute_running=False)
        await control.forget_pictures()
        wrong.append(await wrong_logprobs(address, kept(segment), {SQUARE.digest: SQUARE}))
    await transport.close()
    assert len(wrong[0]) > sum(segment.mask) // 2 and wrong[1] == []


async def test_the_scripted_server_answers_in_the_same_shapes(url: str, found: Capabilities):
    shown = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in (SQUARE, WIDE)]
    rendered = {"messages": [{"role": "user", "content": [{"type": "text", "text": "See: "}, *shown]}], "max_tokens": 4}
    parts = [{"type": "image_url", "url": data_url(picture)} for picture in (SQUARE, WIDE)]
    generated = {"content_parts": parts, "return_token_ids": True, "sampling_params": {"max_tokens": 4, "prompt_logprobs": 0}}
    async with ScriptedServer(pictures=True, max_model_len=2048) as scripted:
        real, ours = (url, MODEL), (scripted.url, "scripted")
        for path in ("/tokenize", "/v1/chat/completions"):
            await same_shapes(path, rendered, real, ours)
        await same_shapes("/v1/chat/completions/render", rendered | {"mm_payload": "none"}, real, ours)
        for number_of_ids in (2, 1, 0):
            for stream in (False, True) if number_of_ids == 2 else (False,):
                answers = [
                    await ask(GENERATE, generated | {"token_ids": [65, *[token] * number_of_ids], "stream": stream}, *server)
                    for server, token in ((real, found.picture_id), (ours, scripted.picture_id))
                ]
                compare(*answers, f"{number_of_ids} pictures in the ids of a generate request")
