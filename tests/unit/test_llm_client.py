"""The model client against a server that speaks vLLM's API and fails on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from rollouts.llm.capabilities import Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import ChatMessage, Piece, Sampling, ServerAddress, TokenPrompt


@pytest.fixture
async def client() -> AsyncIterator[ModelClient]:
    client = ModelClient()
    yield client
    await client.close()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


async def ask(client: ModelClient, server: ScriptedServer, text: str, sampling: Sampling | None = None, timeout: float = 20):
    messages: list[ChatMessage] = [{"role": "user", "content": text}]
    prompt = await client.render(server.address(), messages, add_generation_prompt=True)
    return await client.generate(server.address(), prompt, sampling or Sampling(), timeout=timeout)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_ids_and_logprobs_come_back_as_sampled(client, server):
    completion = await ask(client, server, "[[reply:the number of the day]]")
    assert completion.text == "the number of the day"
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs) == len(completion.token_ids)
    assert all(value <= 0 for value in completion.logprobs)
    decoded = await client.detokenize(server.address(), completion.token_ids)
    assert decoded == "the number of the day<|im_end|>"


async def test_a_stream_may_begin_with_the_ids_of_a_long_prompt(client):
    async with ScriptedServer(max_model_len=300_000) as server:
        known = await client.encode(server.address(), "the number of the day")
        prompt = TokenPrompt([max(known)] * 250_000)
        pieces = []

        async def emit(piece: Piece) -> None:
            pieces.append(piece)

        completion = await client.generate(server.address(), prompt, Sampling(max_tokens=3), timeout=60, emit=emit)
    assert [token for piece in pieces for token in piece.token_ids] == completion.token_ids
    assert len(completion.token_ids) == 3


async def test_equal_prompts_are_sampled_differently_and_temperature_zero_is_greedy(client, server):
    drawn = [await ask(client, server, "[[reply:there and another one]]") for _ in range(4)]
    assert len({tuple(completion.token_ids) for completion in drawn}) > 1
    greedy = [await ask(client, server, "[[reply:there and another one]]", Sampling(temperature=0)) for _ in range(3)]
    assert len({tuple(completion.token_ids) for completion in greedy}) == 1


async def test_a_stop_string_stays_in_the_text_as_its_ids_do(client, server):
    completion = await ask(client, server, "[[reply:one </tool_call> two]]", Sampling(stop=("</tool_call>",)))
    assert completion.text == "one </tool_call>"
    assert completion.finish_reason == "stop"
    assert (await client.detokenize(server.address(), completion.token_ids)).startswith("one </tool_call>")


async def test_the_turn_limit_cuts_a_reply(client, server):
    completion = await ask(client, server, "[[reply:a rather long reply to this]]", Sampling(max_tokens=3))
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 3


@pytest.mark.parametrize("reason", ["length", "content_filter", "abort"])
async def test_finish_reasons(client, server, reason):
    assert (await ask(client, server, f"[[reply:well]][[{reason}]]")).finish_reason == reason


async def test_a_prompt_that_fills_the_context_is_not_sent(client, server):
    with pytest.raises(ContextOverflow):
        await client.generate(server.address(), TokenPrompt([65] * server.max_model_len), Sampling(), timeout=5)
    assert server.finished == 0


async def test_the_last_free_token_is_used(client, server):
    completion = await client.generate(server.address(), TokenPrompt([65] * (server.max_model_len - 1)), Sampling(), timeout=5)
    assert len(completion.token_ids) == 1


async def test_a_servers_own_context_refusal_is_an_overflow_too(client):
    async with ScriptedServer(max_model_len=100) as server:
        believed = ServerAddress(server.url, server.model, "policy", 0, max_model_len=4096)
        with pytest.raises(ContextOverflow, match="maximum context length is 100"):
            await client.generate(believed, TokenPrompt([65] * 200), Sampling(max_tokens=50), timeout=5)


async def test_one_missing_logprob_drops_them_all(client, server):
    completion = await ask(client, server, "[[reply:some words]][[omit_logprob]]")
    assert completion.token_ids
    assert completion.logprobs is None


async def test_a_logprob_that_is_not_a_number_is_refused(client, server):
    with pytest.raises(ModelError, match="not finite"):
        await ask(client, server, "[[reply:some words]][[nan]]")


async def test_a_server_without_ids_gives_text(client, server):
    completion = await ask(client, server, "[[reply:some words]][[omit_ids]]")
    assert (completion.text, completion.token_ids, completion.logprobs) == ("some words", [], None)


async def test_a_server_that_is_known_for_its_ids_has_to_give_them(client, server):
    prompt = TokenPrompt(await client.encode(server.address(), "[[omit_ids]]"))
    server.switches.omit_token_ids = True
    with pytest.raises(ModelError, match="no token ids") as caught:
        await client.generate(server.address(features=[Feature.TOKEN_IDS]), prompt, Sampling(), timeout=20)
    assert caught.value.retryable


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_passing_failures_are_tried_again(client, server, status):
    server.switches.fail_next, server.switches.status = 2, status
    assert (await ask(client, server, "[[reply:at last]]")).text == "at last"


async def test_a_connection_closed_without_an_answer_is_tried_again(client, server):
    server.switches.fail_next, server.switches.status = 1, 0
    assert (await ask(client, server, "[[reply:at last]]")).text == "at last"


async def test_attempts_are_bounded(client, server):
    server.switches.fail_next = 100
    with pytest.raises(ModelError, match="503") as caught:
        await ask(client, server, "hello")
    assert (caught.value.retryable, caught.value.status) == (True, 503)
    assert server.switches.fail_next == 96


async def test_no_retry_when_the_server_asks_for_more_time_than_there_is(client, server):
    server.switches.fail_next, server.switches.status, server.switches.retry_after = 100, 429, 60
    started = time.monotonic()
    with pytest.raises(ModelError, match="429"):
        await ask(client, server, "hello", timeout=30)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (404, False), (500, True)])
async def test_other_refusals_are_not_repeated(client, server, status, retryable):
    server.switches.fail_next, server.switches.status = 100, status
    with pytest.raises(ModelError) as caught:
        await ask(client, server, "hello")
    assert (caught.value.retryable, caught.value.status) == (retryable, status)
    assert server.switches.fail_next == 99


async def test_an_unreachable_server(client, unused_tcp_port):
    address = ServerAddress(f"http://127.0.0.1:{unused_tcp_port}", "m", "p", 0, 100)
    with pytest.raises(ModelError, match="unreachable") as caught:
        await client.generate(address, TokenPrompt([1]), Sampling(), timeout=20)
    assert caught.value.retryable


async def test_a_late_answer_is_an_error_and_ends_the_request(client, server):
    with pytest.raises(ModelError, match=r"within 0\.2 s") as caught:
        await ask(client, server, "[[delay:30]]", timeout=0.2)
    assert caught.value.retryable
    await until(lambda: server.aborted == 1)


async def test_cancelling_a_call_ends_the_request_at_the_server(client, server):
    call = asyncio.create_task(ask(client, server, "[[delay:30]]"))
    await until(lambda: server.running == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: server.aborted == 1 and server.running == 0)


async def test_the_api_key_is_sent_and_never_shown(client):
    async with ScriptedServer(api_key="sk-very-secret") as server:
        assert "sk-very-secret" not in repr(server.address())
        assert (await ask(client, server, "[[reply:come in]]")).text == "come in"
        stranger = ServerAddress(server.url, server.model, "policy", 0, 4096, api_key="sk-wrong-secret")
        with pytest.raises(ModelError) as caught:
            await client.generate(stranger, TokenPrompt([65]), Sampling(), timeout=5)
        assert caught.value.status == 401
        assert not caught.value.retryable
        assert "secret" not in str(caught.value)


async def test_256_calls_at_once_share_the_client(client):
    async with ScriptedServer(delay=0.3) as server:
        started = time.monotonic()
        completions = await asyncio.gather(*(ask(client, server, f"[[reply:answer {n}]]") for n in range(256)))
        assert [completion.text for completion in completions] == [f"answer {n}" for n in range(256)]
        assert time.monotonic() - started < 10, "the calls did not run side by side"


@pytest.fixture
async def odd_server() -> AsyncIterator[Callable[[str, Callable[[web.Request], Awaitable[web.Response]]], Awaitable[str]]]:
    """Starts a server with one odd answer to POST and returns its URL."""
    runners = []

    async def start(path: str, handler: Callable[[web.Request], Awaitable[web.Response]]) -> str:
        app = web.Application()
        app.router.add_post(path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>", "not JSON"),
        ("[]", "not an object"),
        ("{}", "no choice"),
        ('{"choices": []}', "no choice"),
        ('{"choices": [{"text": "a", "finish_reason": null}]}', "finish reason"),
        ('{"choices": [{"text": "a", "finish_reason": "stop", "token_ids": ["1"]}]}', "token ids"),
        ('{"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [true]}]}', "token ids"),
    ],
)
async def test_malformed_answers_are_the_servers_failure(client, odd_server, answer, message):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=answer)

    url = await odd_server("/v1/completions", handler)
    with pytest.raises(ModelError, match=message) as caught:
        await client.generate(ServerAddress(url, "m", "p", 0, 100), TokenPrompt([1]), Sampling(), timeout=5)
    assert caught.value.retryable


async def test_a_key_that_a_server_repeats_is_cut_out(client, odd_server):
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": f"bad {request.headers['Authorization']}"}}, status=403)

    url = await odd_server("/v1/completions", handler)
    with pytest.raises(ModelError, match=r"bad Bearer \[api key\]"):
        await client.generate(ServerAddress(url, "m", "p", 0, 100, api_key="sk-1"), TokenPrompt([1]), Sampling(), timeout=5)


async def test_what_the_request_says(client, odd_server):
    bodies = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"choices": [{"text": "a", "finish_reason": "stop"}]})

    url = await odd_server("/v1/completions", handler)
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, max_tokens=50)
    await client.generate(ServerAddress(url, "m", "p", 0, 30), TokenPrompt([1, 2, 3]), sampling, timeout=5)
    assert bodies[0] == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 27,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": True,
    }


async def test_a_closed_client_opens_no_connection_again(server):
    client = ModelClient()
    await ask(client, server, "[[reply:yes]]")
    await client.close()
    with pytest.raises(ModelError, match="closed") as caught:
        await ask(client, server, "[[reply:yes]]")
    assert caught.value.retryable  # a worker that ends must not fail a rollout for good
    await client.close()
