"""The whole way with a real vLLM (a tiny random model): what is stored is what was sampled, also while weights change.

One file, because its tests share one server and change its weights: a process runs the tests of a file one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest

from rollouts.client import Client
from rollouts.llm.capabilities import Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.messages import data_url
from rollouts.llm.probe import probe
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import Sampling, ServerAddress, TokenPrompt
from tests.acceptance.platform import ISSUE_KEY, Platform, install_environments, running_platform
from tests.acceptance.shapes import same_shapes
from tests.pictures import png
from tests.services.vllm import MODEL_FILES, other_weights
from tests.unit.gateways import BASH, KEY, serve

MODEL = MODEL_FILES.name
CONCURRENT = 32
TOLERANCE = 1e-3  # of logprobs: the same sums in another order


class Site(NamedTuple):
    """A platform whose server is the real vLLM, rendered for by the model's own tokenizer files."""

    platform: Platform
    client: Client
    server_id: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, vllm_url: str) -> Iterator[Site]:
    """On the broker made of files: one platform of this suite should live as `prorl up` does."""
    folder = tmp_path_factory.mktemp("vllm")
    with running_platform(folder / "var") as platform:
        install_environments(platform, folder, talk="tests.acceptance.talk_environment:Talk")
        platform.start_execution(concurrency=CONCURRENT)
        with Client(platform.start_web(), platform.shell(ISSUE_KEY)) as client:
            server = client.register_server(vllm_url, policy="tiny", capacity=CONCURRENT, tokenizer=str(MODEL_FILES))
            client.create_environment("talk", handler="talk")
            yield Site(platform, client, server["id"])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, vllm_url: str) -> Iterator[list[Path]]:
    """The model's weights and others; the server has the first when the tests of this file have ended."""
    yield [MODEL_FILES, other_weights(tmp_path_factory.mktemp("weights") / "other")]
    with httpx.Client(base_url=vllm_url, timeout=60) as server:
        server.post("/pause", params={"mode": "abort"})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(MODEL_FILES)}}
        server.post("/collective_rpc", json=reload).raise_for_status()
        server.post("/reset_prefix_cache")
        server.post("/update_weight_version", json={"new_version": "default"})
        server.post("/resume").raise_for_status()


@pytest.fixture
def address(vllm_url: str) -> ServerAddress:
    return ServerAddress(vllm_url, MODEL, "policy", 7, 2048)


def talk(site: Site, name: str, *, n: int, **settings: Any) -> str:
    """A run of conversations of three turns; its id."""
    run = site.client.create_run(name, policy="tiny", settings={"sampling": {"max_tokens": 80}, **settings})
    site.client.submit_groups(run["id"], [{"n": 8, "environment": "talk", "payload": {}} for _ in range(n // 8)])
    return str(run["id"])


def test_concurrent_conversations_are_exact(site: Site, vllm_url: str):
    """32 at once, three turns each: ids, text and logprobs are what the server sampled, and reads them as."""
    results = list(site.client.iter_results(talk(site, "load", n=CONCURRENT), include="trajectory"))
    assert len(results) == CONCURRENT
    whole = 0
    for rollout in results:
        assert (rollout["state"], rollout["reward"]) == ("succeeded", 1.0)
        trajectory = rollout["trajectory"]
        assert (len(trajectory["model_calls"]), trajectory["token_problem"]) == (3, "")
        assert {call["server"] for call in trajectory["model_calls"]} == {site.server_id}
        whole += rollout["fidelity"] == "token-exact"
        cut = any(call["finish_reason"] == "length" for call in trajectory["model_calls"][:-1])
        assert rollout["fidelity"] == ("segmented" if cut else "token-exact")
        for segment in trajectory["segments"]:
            assert sum(segment["loss_mask"]) > 0
            assert wrong_logprobs(vllm_url, segment) == []
    assert whole > CONCURRENT // 2
    call = results[0]["trajectory"]["model_calls"][0]
    assert decoded(vllm_url, call["sampled_ids"]) == call["text"]


@pytest.mark.parametrize("mode", ["drain", "continue", "abort"])
def test_new_weights_while_conversations_are_under_way(site: Site, vllm_url: str, weights: list[Path], mode: Any):
    """Every sampled token is labelled with the version that sampled it: a recomputation under the new weights agrees with the
    tokens of the new version, and with hardly one of the old."""
    version = site.client.policy("tiny")["version"] + 1
    run_id = talk(site, mode, n=3 * CONCURRENT)
    stored = "SELECT count(*) FROM rollouts_modelcall c JOIN rollouts_rollout r ON r.id = c.rollout_id WHERE r.run_id = %s"
    site.platform.wait_for(lambda: site.platform.value(stored, run_id) >= 16, "model calls")
    site.client.announce_version("tiny", version, weights=str(weights[version % 2]), mode=mode)
    announced = site.client.wait_for_version("tiny", version, timeout=90)
    assert (announced["state"], [report["state"] for report in announced["report"].values()]) == ("live", ["live"])

    # However fast the machine is, the weights change in the middle; however slow, those under way then are enough.
    renewed = "SELECT count(*) FROM rollouts_rollout WHERE run_id = %s AND state = 'succeeded' AND policy_version = %s"
    site.platform.wait_for(lambda: site.platform.value(renewed, run_id, version) >= CONCURRENT, "talks", timeout=180)
    site.client.cancel_run(run_id)
    results = list(site.client.iter_results(run_id, include="trajectory"))
    assert {rollout["state"] for rollout in results} <= {"succeeded", "cancelled"}
    results = [rollout for rollout in results if rollout["state"] == "succeeded"]
    calls = [call for rollout in results for call in rollout["trajectory"]["model_calls"]]
    segments = [segment for rollout in results for segment in rollout["trajectory"]["segments"]]
    old = new = mistaken = 0
    with ThreadPoolExecutor(8) as threads:
        for segment, wrong in zip(segments, threads.map(lambda s: wrong_logprobs(vllm_url, s), segments), strict=True):
            by_new = {at for at, label in enumerate(segment["policy_versions"]) if label == version}
            assert {label for label in segment["policy_versions"] if label != -1} <= {version - 1, version}
            assert not by_new & set(wrong)
            new += len(by_new)
            old += len(wrong)
            mistaken += sum(segment["loss_mask"]) - len(by_new) - len(wrong)
    assert new > 0 and old > 0
    assert mistaken <= old // 20  # old tokens whose probability happens to be the same
    mixed = [call for call in calls if len(call["version_spans"]) > 1]
    assert bool(mixed) == (mode != "drain"), f"{len(mixed)} replies of two versions"
    for call in calls:
        assert sum(count for _, count in call["version_spans"]) == len(call["sampled_ids"])
        assert call["finish_reason"] in ("stop", "length")


def wrong_logprobs(vllm_url: str, segment: dict[str, Any]) -> list[int]:
    """vLLM scores the stored sequence as a prompt; the sampled positions where it finds another probability than was stored."""
    body = {"model": MODEL, "prompt": segment["token_ids"], "max_tokens": 1, "prompt_logprobs": 0}
    answer = httpx.post(f"{vllm_url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    scored = answer["choices"][0]["prompt_logprobs"]
    columns = itertools.count(), segment["token_ids"], segment["loss_mask"], segment["logprobs"], scored
    return [
        at
        for at, token, sampled, stored, entry in zip(*columns, strict=False)
        if sampled and not math.isclose(entry[str(token)]["logprob"], stored, abs_tol=TOLERANCE)
    ]


def decoded(vllm_url: str, ids: list[int]) -> str:
    """What vLLM's own tokenizer makes of the ids, without special tokens (as it left them out of the text)."""
    text = httpx.post(f"{vllm_url}/detokenize", json={"model": MODEL, "tokens": ids}).json()["prompt"]
    for special in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"):
        text = text.replace(special, "")
    return str(text)


async def test_the_probe_finds_what_it_offers(vllm_url: str):
    found = await probe(vllm_url, tokenizer=str(MODEL_FILES))  # which proves the renders equal, too
    assert (found.model, found.engine, found.max_model_len) == (MODEL, "vllm", 2048)
    assert found.features == set(Feature) - {Feature.LORA, Feature.PICTURES}  # LORA it has only with --enable-lora
    assert found.picture_id is None


async def test_a_prompt_that_is_too_long_is_an_overflow_however_it_is_asked(address: ServerAddress):
    client = ModelClient()
    believed = ServerAddress(address.url, MODEL, "policy", 7, 9000)
    try:
        for features in ({Feature.GENERATE}, set()):
            server = replace(believed, features=frozenset(features))
            with pytest.raises(ContextOverflow):
                await client.generate(server, TokenPrompt([9] * 3000), Sampling(max_tokens=5), timeout=30)
        with pytest.raises(ModelError, match="does not exist"):
            await client.generate(
                ServerAddress(address.url, "nobody", "p", 0, 2048), TokenPrompt([9]), Sampling(max_tokens=5), timeout=30
            )
    finally:
        await client.close()


async def test_stop_strings_are_in_the_text_as_they_are_in_the_ids(address: ServerAddress, vllm_url: str):
    client = ModelClient()
    try:
        for features in (frozenset({Feature.GENERATE}), frozenset[Feature]()):
            server = replace(address, features=features)
            reply = await client.generate(server, TokenPrompt([1, 2, 3]), Sampling(max_tokens=200, stop=("e", "a")), timeout=60)
            assert reply.finish_reason == "stop"
            assert reply.logprobs is not None and len(reply.logprobs) == len(reply.token_ids)
            assert decoded(vllm_url, reply.token_ids).startswith(reply.text)
    finally:
        await client.close()


async def test_official_clients_through_the_gateway(address: ServerAddress):
    """Whole, streamed, and with tools; all of it is one agent's, stored with ids and logprobs."""
    server = replace(address, features=frozenset({Feature.GENERATE}), tokenizer=str(MODEL_FILES))
    async with serve(None, route=FixedRoute(server), sampling=Sampling(max_tokens=30)) as gateway:  # type: ignore[arg-type]
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "Hello"}]
            first = await client.chat.completions.create(model="policy", messages=messages, max_tokens=60)
            messages += [
                {"role": "assistant", "content": first.choices[0].message.content},
                {"role": "user", "content": "More"},
            ]
            tools: list[Any] = [{"type": "function", "function": BASH}]
            stream = await client.chat.completions.create(model="policy", messages=messages, tools=tools, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert gateway.memory.calls[-1].text == "".join(pieces)
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as other:
            said: list[Any] = [{"role": "user", "content": "Hello"}]
            async with other.messages.stream(model="policy", max_tokens=20, messages=said) as events:
                text = await events.get_final_text()
            assert gateway.memory.calls[-1].text == text
        assert len(gateway.memory.calls) == 3
        for call in gateway.memory.calls:
            assert call.logprobs is not None and len(call.logprobs) == len(call.sampled_ids) > 0
        gateway.memory.validated()


async def test_the_scripted_server_answers_in_the_same_shapes(vllm_url: str):
    """What tests and users' environments run against is no other API than what training runs against."""
    async with ScriptedServer(max_model_len=2048) as scripted:
        for path, body in requests():
            await same_shapes(path, body, (vllm_url, MODEL), (scripted.url, "scripted"))


def requests() -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Paths and bodies; None is a GET."""
    text: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    ids: dict[str, Any] = {"prompt": [65, 66, 67], "max_tokens": 4}
    for stream in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        yield "/v1/completions", ids | options
        yield "/v1/completions", ids | options | {"return_token_ids": True, "logprobs": 0, "n": 2}
        yield "/v1/chat/completions", text | options
        yield "/v1/chat/completions", text | options | {"return_token_ids": True, "logprobs": True, "top_logprobs": 1}
        for mode in ("text", "tokens"):
            sampling = {"max_tokens": 4, "logprobs": 0}
            asked = {"token_ids": [65, 66, 67], "sampling_params": sampling, "output_mode": mode, "return_token_ids": True}
            yield "/inference/v1/generate", asked | options
    yield "/v1/completions", ids | {"prompt_logprobs": 0}
    yield "/v1/completions", {"prompt": [65] * 3000, "max_tokens": 4}
    yield "/v1/completions", {"prompt": [65], "max_tokens": 3000}
    yield "/v1/completions", {"prompt": [10**7], "max_tokens": 1}
    yield "/v1/chat/completions", {"messages": []}
    yield "/tokenize", {"messages": text["messages"], "return_token_strs": True}
    yield "/v1/chat/completions/render", text
    yield "/v1/chat/completions/render", {"messages": []}
    shown = [{"type": "image_url", "image_url": {"url": data_url(png(8, 8, (255, 0, 0)))}}]
    for path in ("/tokenize", "/v1/chat/completions", "/v1/chat/completions/render"):
        yield path, {"messages": [{"role": "user", "content": shown}]}
    parts = [{"type": "image_url", "url": shown[0]["image_url"]["url"]}]
    yield "/inference/v1/generate", {"token_ids": [65], "sampling_params": {"max_tokens": 4}, "content_parts": parts}
    yield "/detokenize", {"tokens": [65, 66]}
    yield "/pause?mode=keep", {}
    yield "/is_paused", None
    yield "/reset_prefix_cache", {}
    yield "/resume", {}
    yield "/abort_requests", {}
    yield "/update_weight_version", {"new_version": "12"}
    yield "/update_weight_version", {"new_version": 12}
    yield "/weight_info", None
    yield "/update_weight_version", {"new_version": "default"}
    yield "/sleep?level=1", {}
    yield "/is_sleeping", None
    yield "/wake_up", {}
    yield "/v1/models", None
    yield "/version", None
    yield "/load", None
