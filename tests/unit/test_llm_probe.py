"""What a probe finds out about a model server, and that it finds out no more than there is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from rollouts.llm.capabilities import Feature
from rollouts.llm.errors import ModelError
from rollouts.llm.probe import WrongTokenizer, probe
from rollouts.llm.scripted.server import ScriptedServer

_EXACT = {Feature.ID_PROMPTS, Feature.TOKEN_IDS, Feature.LOGPROBS, Feature.TOKENIZE}


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


@pytest.fixture
async def plain() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts a server that has nothing but `/v1/models` and chat completions; its URL."""
    runners = []

    async def start(owner: str = "me", **entry: object) -> str:
        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "chatty", "owned_by": owner, **entry}]})

        async def chat(request: web.Request) -> web.Response:
            return web.json_response({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]})

        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_it_tells_what_a_server_offers(server: ScriptedServer) -> None:
    found = await probe(server.url + "/")
    assert (found.models, found.model, found.max_model_len) == (("scripted",), "scripted", 8192)
    assert found.features >= {*_EXACT, Feature.METRICS}
    assert found.version
    assert found.engine == "vllm"


async def test_it_tells_what_a_server_lacks(server: ScriptedServer) -> None:
    server.switches.omit_token_ids = server.switches.omit_logprobs = True
    found = await probe(server.url)
    assert not {Feature.TOKEN_IDS, Feature.LOGPROBS} & found.features
    assert {Feature.ID_PROMPTS, Feature.TOKENIZE} <= found.features


async def test_a_server_without_ids_has_none_of_what_needs_them(plain: Callable[..., Awaitable[str]]) -> None:
    found = await probe(await plain())
    assert found.features == {Feature.CHAT_TOOLS}
    assert (found.engine, found.max_model_len, found.version, found.weight_version) == ("openai", None, "", "")


async def test_sglang_is_told_by_the_owner_of_its_models(plain: Callable[..., Awaitable[str]]) -> None:
    found = await probe(await plain(owner="sglang", max_model_len=4096))
    assert (found.engine, found.max_model_len) == ("sglang", 4096)


async def test_a_wrong_key_is_no_missing_feature() -> None:
    async with ScriptedServer(api_key="right") as server:
        with pytest.raises(ModelError) as caught:
            await probe(server.url, api_key="wrong")
        assert caught.value.status == 401
        assert "wrong" not in str(caught.value)


async def test_what_is_no_server_is_no_server() -> None:
    with pytest.raises(ModelError, match="unreachable"):
        await probe("http://127.0.0.1:9")


async def test_a_tokenizer_that_is_not_there_is_refused(server: ScriptedServer) -> None:
    with pytest.raises(WrongTokenizer, match="no-such-directory"):
        await probe(server.url, tokenizer="/no-such-directory")


async def test_a_server_that_hangs_up_on_what_it_does_not_know_is_taken_as_it_is() -> None:
    known = (b"GET /v1/models", b"POST /v1/completions", b"POST /tokenize")
    completion = {"text": "a", "finish_reason": "stop", "token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}
    answers = [{"data": [{"id": "m", "max_model_len": 99}]}, {"choices": [completion]}, {"tokens": [1, 2]}]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        for begin, answer in zip(known, answers, strict=True):
            if head.startswith(begin):
                body = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        found = await probe(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert found.features == _EXACT
