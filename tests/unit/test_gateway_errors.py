"""What the gateway refuses: in each dialect's shape, by the name of the field, and never with a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.gateway import SessionClosed, create_app
from rollouts.gateway.endpoint import Limits
from rollouts.gateway.errors import refusal_of
from rollouts.llm.errors import ModelError
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from tests.unit.gateways import KEY, Gateway, open_session, serve

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with ScriptedServer() as server, serve(server, Limits(body_bytes=1_500_000)) as gateway:
        yield gateway


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
        yield http


def error_of(path: str, answer: httpx.Response) -> dict:
    """The error, in the shape of the dialect of a path."""
    body = answer.json()
    if path.startswith("/v1beta"):
        assert body["error"]["code"] == answer.status_code and body["error"]["status"]
    elif path == "/v1/messages":
        assert body["type"] == "error" and body["error"]["type"]
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize("path", PATHS)
async def test_keys_bodies_and_methods(gateway, http, path):
    nobody = {"Authorization": ""}
    for answer, status in [
        (await http.post(path, json=PATHS[path], headers=nobody), 401),
        (await http.post(path, json=PATHS[path], headers={"Authorization": "Bearer unknown"}), 401),
        (await http.post(path, content=b"not json"), 400),
        (await http.post(path, content=b"[1]"), 400),
        (await http.post(path, content=b'{"a":' * 2000), 400),
        (await http.post(path, json={"model": "x" * 2_000_000}), 413),
        (await http.post(path, json=PATHS[path] | {"unheard_of": 1}), 400),
        (await http.get(path), 405),
    ]:
        assert answer.status_code == status, answer.text
        error_of(path, answer)
    gateway.sessions["ended"] = SessionClosed("its reward was given")
    answer = await http.post(path, json=PATHS[path], headers={"Authorization": "Bearer ended"})
    assert answer.status_code == 403 and "its reward was given" in error_of(path, answer)["message"]


@pytest.mark.parametrize("headers", [{"x-api-key": KEY}, {"x-goog-api-key": KEY}, {"Authorization": f"bearer {KEY}"}])
async def test_keys_come_in_several_headers(gateway, headers):
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{gateway.url}/v1/models", headers=headers)).status_code == 200
        assert (await http.get(f"{gateway.url}/v1beta/models", params={"key": KEY})).status_code == 200
        assert (await http.get(f"{gateway.url}/v1/models")).status_code == 401
        assert (await http.get(f"{gateway.url}/livez")).text == "ok\n"
        assert (await http.get(f"{gateway.url}/nothing")).status_code == 404


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"1": 5}),
        ("temperature", "hot"),
        ("temperature", 3),
        ("max_tokens", 0),
        ("n", 1000),
        ("stop", [""]),
        ("stream", "yes"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "bash"}}),
        ("tools.0.type", [{"type": "custom"}]),
        ("tools.0.function.name", [{"type": "function", "function": {}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "description": "long" * 130_000}}]),
        ("stop", ["x" * 2000]),
        ("model", "m" * 1000),
        ("messages", [{"role": "user", "content": ""}] * 30_000),
        ("messages", []),
        ("messages.0.role", [{"role": "robot", "content": ""}]),
        ("messages.0.content", [{"role": "user", "content": 5}]),
        ("messages.0.content.0.type", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]),
        ("messages.0.tool_calls.0.function", [{"role": "assistant", "tool_calls": [{"id": "a"}]}]),
    ],
)
async def test_what_would_change_the_meaning_is_refused_by_name(http, field, value):
    body = {"messages": MESSAGES} | {field.partition(".")[0]: value}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert error_of("/v1/chat/completions", answer)["param"] == field


async def test_what_changes_nothing_is_ignored(http):
    harmless = {"metadata": {"a": "b"}, "user": "me", "store": True, "top_logprobs": 0, "frequency_penalty": 0, "audio": None}
    answer = await http.post("/v1/chat/completions", json={"messages": MESSAGES} | harmless)
    assert answer.status_code == 200


async def test_a_prompt_that_is_too_long(gateway, http):
    answer = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "long " * 9000}]})
    error = error_of("/v1/chat/completions", answer)
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 8192 tokens" in error["message"]
    assert gateway.session.overflows == 1


async def test_a_prompt_that_is_far_too_long_bothers_no_server(http):
    async with ScriptedServer() as server:
        gone = FixedRoute(server.address())
    async with serve(server, Limits(), route=gone) as gateway:
        ask = {"messages": [{"role": "user", "content": "long " * 250_000}]}
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=ask)
        assert error_of("/v1/chat/completions", answer)["code"] == "context_length_exceeded"
        assert gateway.session.overflows == 1 and gateway.session.failure is None


async def test_servers_that_fail_are_no_ones_reply(gateway, http):
    ask = {"messages": [{"role": "user", "content": "[[fail:400]]"}]}
    answer = await http.post("/v1/chat/completions", json=ask)
    assert answer.status_code in (400, 502), answer.text

    class Nowhere(FixedRoute):
        def call(self):
            raise ModelError("no server serves this policy", retryable=True, status=503)

    async with ScriptedServer() as server, serve(server, route=Nowhere(server.address())) as empty:
        answer = await http.post(f"{empty.url}/v1/chat/completions", json={"messages": MESSAGES})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert empty.session.failure is not None and empty.memory.records == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 503])
async def test_agents_are_not_told_where_model_servers_are(caplog, status, stream):
    async with ScriptedServer() as server, serve(server, call_timeout=2) as gateway:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
            ask = {"messages": [{"role": "user", "content": f"[[fail:{status}]]"}], "stream": stream}
            answer = await http.post(f"{gateway.url}/v1/chat/completions", json=ask)
        assert answer.status_code in (400, 502, 503)
        assert "127.0.0.1" not in answer.text and "://" not in answer.text
        assert (answer.status_code == 400) == (status == 400)
        assert status != 400 or "the model server answered 400: scripted failure" in answer.text
        assert server.url in caplog.text and (status == 400 or server.url in str(gateway.session.failure))


@pytest.mark.parametrize("path", PATHS)
async def test_agents_are_not_told_which_server_is_gone(path):
    async with ScriptedServer() as server:
        gone = server.address()
    async with serve(server, route=FixedRoute(gone), call_timeout=2) as gateway:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
            answer = await http.post(f"{gateway.url}{path}", json=PATHS[path])
        assert answer.status_code == 503 and "127.0.0.1" not in answer.text and "://" not in answer.text
        assert error_of(path, answer)["message"] == "no model server could answer this call; send it again"
        assert gone.url in str(gateway.session.failure)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("http://vllm-3.internal:8000/tokenize answered 400: no", "the model server answered 400: no"),
        ("m at https://10.0.0.7 refuses 'a'", "m at the model server refuses 'a'"),
        ("10.0.0.7:8000 and [fd00::1]:8000 refuse", "the model server and the model server refuse"),
        ("mm_items['image'][0]: 3.5 of [1, 2] at 12:30", "mm_items['image'][0]: 3.5 of [1, 2] at 12:30"),
    ],
)
def test_what_is_wrong_with_a_request_is_told_without_addresses(said, told):
    assert str(refusal_of(ModelError(said, retryable=False, status=400))) == told


async def test_the_requests_of_a_session_are_bounded_together():
    limits = Limits(body_bytes=5000, session_bytes=7000)
    async with ScriptedServer() as server, serve(server, limits) as gateway:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as http:
            content = "[[delay:60]]" + "x" * 4000
            one = asyncio.create_task(
                http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
            )
            async with asyncio.timeout(20):
                while not server.running:
                    await asyncio.sleep(0.005)
            body = {"messages": [{"role": "user", "content": "x" * 4000}]}
            answer = await http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            one.cancel()
            async with asyncio.timeout(20):
                while gateway.session.bytes_under_way:
                    await asyncio.sleep(0.005)
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_body_that_never_ends_is_given_up():
    async with ScriptedServer() as server, serve(server, Limits(body_seconds=0.2)) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n{{"
        writer.write(head.encode())
        assert b"408" in await asyncio.wait_for(reader.readline(), 20)
        writer.close()


NAMES = [
    *("role", "content", "type", "text", "name", "id", "function", "arguments", "tool_calls", "tool_call_id", "parts", "args"),
    *("functionCall", "functionResponse", "response", "input", "input_schema", "output", "call_id", "summary", "tool_use_id"),
    *("image_url", "url", "file_id", "source", "media_type", "data", "inlineData", "mimeType"),
]
FIELDS = [
    *("messages", "contents", "input", "prompt", "tools", "tool_choice", "toolConfig", "systemInstruction", "system", "stop"),
    *("instructions", "generationConfig", "max_tokens", "temperature", "n", "stream", "stream_options", "logprobs", "seed"),
]
TYPES = [
    *("text", "tool_use", "tool_result", "function", "function_call", "function_call_output", "message", "reasoning"),
    *("image_url", "input_image", "image", "base64", "data:image/png;base64,iVBORw0KGgo=", "image/png"),
]
ROLES = ["user", "assistant", "system", "tool", "model"]
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    leaves | st.sampled_from(TYPES + ROLES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=16,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(PATHS)), st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_no_body_is_a_500(path, fields):
    answer = asyncio.run(_answer(path, PATHS[path] | fields))
    assert answer.status_code in (200, 400), answer.text


async def _answer(path: str, body: dict) -> httpx.Response:
    async with (
        ScriptedServer() as server,
        open_session(server) as gateway,
        httpx.AsyncClient(transport=httpx.ASGITransport(create_app(gateway)), base_url="http://gateway") as http,
    ):
        return await http.post(path, content=json.dumps(body).encode(), headers={"Authorization": f"Bearer {KEY}"})
