"""The scripted server under a trainer's hands: pauses, new weights and their label, adapters, sleep, load and cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from rollouts.llm.scripted.server import ScriptedServer

LONG = "a reply of many words " * 20


class Http:
    """Generation requests that may take long, and control calls."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._session.post(path, json=body) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def get(self, path: str) -> Any:
        async with self._session.get(path) as response:
            return await (response.json() if response.content_type == "application/json" else response.text())

    async def generate(self, text: str, model: str | None = None) -> dict[str, Any]:
        """The choice of a whole reply."""
        _, prompt = await self.post("/tokenize", {"messages": [{"role": "user", "content": f"[[reply:{text}]]"}]})
        body = {"token_ids": prompt["tokens"], "sampling_params": {"max_tokens": 900, "temperature": 0, "logprobs": 0}}
        status, answer = await self.post("/inference/v1/generate", body | {"output_mode": "text", "model": model})
        assert status == 200, answer
        return answer["choices"][0]

    async def metric(self, name: str) -> float:
        lines = (await self.get("/metrics")).splitlines()
        return float(next(line for line in lines if line.startswith(f"vllm:{name}{{")).rpartition(" ")[2])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """Slow enough to be met in the middle of a long reply."""
    async with ScriptedServer(token_delay=0.005, max_running=2) as server:
        yield server


@pytest.fixture
async def http(server: ScriptedServer) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession(server.url) as session:
        yield Http(session)


@pytest.fixture
async def in_the_middle(http: Http) -> Callable[[], Awaitable[asyncio.Task[dict[str, Any]]]]:
    """Begins a long reply, and returns once some of it is sampled."""

    async def begin() -> asyncio.Task[dict[str, Any]]:
        task = asyncio.create_task(http.generate(LONG))
        while await http.metric("kv_cache_usage_perc") == 0 or await http.metric("num_requests_running") == 0:
            await asyncio.sleep(0.005)
        held = await http.metric("kv_cache_usage_perc")
        while await http.metric("kv_cache_usage_perc") == held:
            await asyncio.sleep(0.005)
        return task

    return begin


async def test_abort_ends_what_runs_with_what_it_has(http, in_the_middle):
    task = await in_the_middle()
    assert await http.post("/pause?mode=abort") == (200, {"status": "paused"})
    choice = await task
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == choice["weight_versions"][-1]["end"]
    assert LONG.startswith(choice["text"])


async def test_wait_lets_what_runs_end_and_holds_what_is_new(http, server, in_the_middle):
    task = await in_the_middle()
    pausing = asyncio.create_task(http.post("/pause?mode=wait"))
    assert (await task)["finish_reason"] == "stop"
    assert (await pausing)[0] == 200
    assert await http.get("/is_paused") == {"is_paused": True}
    held = asyncio.create_task(http.generate("short"))
    await until(lambda: server.running == 1)
    assert (await http.metric("num_requests_waiting"), await http.metric("num_requests_running")) == (1, 0)
    assert not held.done()
    await http.post("/resume")
    assert (await held)["text"] == "short"


async def test_keep_freezes_what_runs_and_new_weights_go_on_with_it(http, in_the_middle):
    await http.post("/update_weight_version", {"new_version": "3"})
    task = await in_the_middle()
    await http.post("/pause?mode=keep")
    frozen = await http.metric("kv_cache_usage_perc")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": "/new"}}
    assert await http.post("/collective_rpc", reload) == (200, {"results": [None]})
    assert await http.post("/reset_prefix_cache") == (200, {"success": True})
    await http.post("/update_weight_version", {"new_version": "4"})
    assert await http.get("/weight_info") == {"weight_version": "4"}
    assert await http.metric("kv_cache_usage_perc") == frozen
    await http.post("/resume")
    choice = await task
    old, new = choice["weight_versions"]
    assert (old["version"], new["version"], old["end"]) == ("3", "4", new["start"])
    assert (old["start"], new["end"]) == (0, len(choice["token_ids"]))
    assert choice["text"] == LONG


async def test_requests_are_aborted_without_a_pause(http, in_the_middle):
    task = await in_the_middle()
    assert await http.post("/abort_requests", {}) == (200, {"status": "aborted", "aborted": 1})
    assert (await task)["finish_reason"] == "abort"
    assert (await http.generate("next"))["text"] == "next"


async def test_the_prefix_cache_is_held_by_what_runs(http, in_the_middle):
    task = await in_the_middle()
    assert await http.post("/reset_prefix_cache") == (200, {"success": False})
    assert await http.post("/reset_prefix_cache?reset_running_requests=true") == (200, {"success": True})
    await http.post("/abort_requests", {})
    await task


async def test_new_weights_sample_with_other_probabilities_and_the_old_ones_as_before(http):
    async def logprobs(path: str) -> list[float]:
        await http.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        return [entry["logprob"] for entry in (await http.generate("one two three"))["logprobs"]["content"]]

    one, other, again = await logprobs("/1"), await logprobs("/2"), await logprobs("/1")
    assert one == again
    assert all(left != right for left, right in zip(one, other, strict=True))


async def test_a_reply_can_tell_the_weights(http):
    await http.post("/update_weight_version", {"new_version": "12"})
    _, answer = await http.post("/v1/completions", {"prompt": "[[weights]]"})
    assert answer["choices"][0]["text"] == "12"


async def test_weights_that_cannot_be_loaded(http, server):
    server.switches.fail_reload = True
    status, answer = await http.post("/collective_rpc", {"method": "reload_weights"})
    assert (status, answer["error"]["code"]) == (500, 500)
    assert (await http.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}))[0] == 404


async def test_adapters_come_and_go(http):
    assert (await http.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}))[0] == 200
    assert [model["id"] for model in (await http.get("/v1/models"))["data"]] == ["scripted", "a"]
    base, adapted = await http.generate("one two three"), await http.generate("one two three", model="a")
    assert base["logprobs"] != adapted["logprobs"]
    assert (await http.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/b"}))[0] == 400
    assert (await http.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/b", "load_inplace": True}))[0] == 200
    assert (await http.generate("one two three", model="a"))["logprobs"] != adapted["logprobs"]
    assert (await http.post("/v1/unload_lora_adapter", {"lora_name": "a"}))[0] == 200
    assert (await http.post("/v1/completions", {"prompt": "x", "model": "a"}))[0] == 404


async def test_sleep_holds_requests_until_it_is_over(http, server):
    assert await http.post("/sleep?level=1") == (200, {"status": "sleeping", "level": 1})
    assert await http.get("/is_sleeping") == {"is_sleeping": True}
    held = asyncio.create_task(http.generate("short"))
    await until(lambda: server.running == 1)
    await http.post("/wake_up?tags=weights")
    assert await http.get("/is_sleeping") == {"is_sleeping": True}
    await http.post("/wake_up")
    assert (await held)["text"] == "short"
    assert await http.get("/is_sleeping") == {"is_sleeping": False}


async def test_more_than_it_samples_at_once_wait(http, server):
    tasks = [asyncio.create_task(http.generate(LONG)) for _ in range(5)]
    await until(lambda: server.running == 5)
    assert (await http.metric("num_requests_running"), await http.metric("num_requests_waiting")) == (2, 3)
    for _ in range(3):  # those that wait come next
        await http.post("/abort_requests", {})
    await asyncio.gather(*tasks)
    assert (server.running, server.finished) == (0, 5)


async def test_a_client_that_goes_away_leaves_its_place(http, server, in_the_middle):
    tasks = [await in_the_middle(), asyncio.create_task(http.generate(LONG)), asyncio.create_task(http.generate(LONG))]
    await until(lambda: server.running == 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: server.aborted == 3)
    assert (await http.metric("num_requests_running"), await http.metric("num_requests_waiting")) == (0, 0)
    assert (await http.generate("short"))["text"] == "short"


async def test_a_conversations_prefix_is_found_in_the_cache(http):
    prompt = (await http.post("/tokenize", {"prompt": "a word and another word " * 20}))[1]["tokens"]
    await http.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert await http.metric("prefix_cache_hits_total") == 0
    await http.post("/v1/completions", {"prompt": [*prompt, 65, 66], "max_tokens": 1})
    assert await http.metric("prefix_cache_hits_total") == len(prompt) // 16 * 16
    assert await http.metric("prefix_cache_queries_total") == 2 * len(prompt) + 2
    await http.post("/reset_prefix_cache")
    await http.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert await http.metric("prefix_cache_hits_total") == len(prompt) // 16 * 16


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pause?mode=never", None, 400),
        ("/collective_rpc", {}, 400),
        ("/collective_rpc", {"method": "explode"}, 500),
        ("/update_weight_version", {"new_version": 8}, 400),
        ("/v1/unload_lora_adapter", {"lora_name": "nobody"}, 404),
        ("/control", {"flaw": "another"}, 400),
    ],
)
async def test_wrong_calls_are_refused(http, path, body, status):
    got, answer = await http.post(path, body)
    assert (got, answer["error"]["code"]) == (status, status)
