"""The scripted server as its users meet it: a process, an HTTP API, scripts, directives and failure switches."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.solver import solver
from rollouts.llm.toolcalls import parse_reply

PYTHON_OFFER = 'Tools: {"type": "function", "function": {"name": "python", "parameters": {}}}'


class Http:
    """One session against one server; every call returns status and JSON."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self._session.post(self._url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(self._url + path) as response:
            return response.status, await response.text()

    async def chat(self, *contents: str, **options: Any) -> str:
        """The answer to alternating user and assistant messages; one that begins with "tool: " is a tool's."""
        roles = ["user", "assistant"]
        messages = [
            {"role": "tool", "content": content[6:]}
            if content.startswith("tool: ")
            else {"role": roles[index % 2], "content": content}
            for index, content in enumerate(contents)
        ]
        status, answer = await self.post("/v1/chat/completions", model="scripted", messages=messages, **options)
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(**getattr(request, "param", {})) as server:
        yield server


@pytest.fixture
async def http(server: ScriptedServer) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(session, server.url)


SOLVER = pytest.mark.parametrize("server", [{"script": solver(1.0)}], indirect=True)
GUESSER = pytest.mark.parametrize("server", [{"script": solver(0.0)}], indirect=True)


async def test_echo_repeats_the_last_message(http):
    assert await http.chat("hello [[delay:0.01]]") == "hello"


@SOLVER
@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is 17 + 25? Reply with the number only.", "42"), ("What is 12 - 30?", "-18"), ("3 × 4", "12")],
)
async def test_the_solver_does_sums(http, question, answer):
    assert await http.chat(question) == answer


@GUESSER
async def test_the_solver_can_be_wrong(http):
    assert await http.chat("What is 17 + 25?") in {"32", "41", "43", "52"}


@SOLVER
async def test_the_solver_uses_the_python_tool_and_boxes_what_it_printed(http):
    question = f"{PYTHON_OFFER}\nWhat is (2 + 3) * 4?"
    reply = await http.chat(question)

    class Python:
        parameters = {"properties": {"code": {"type": "string"}}}
        code_argument = "code"

    (call,) = parse_reply(reply, {"python": Python()}).calls
    assert call.arguments == {"code": "print((2 + 3) * 4)"}
    assert "\\boxed{20}" in await http.chat(question, reply, "tool: 20\n")


async def test_directives_act_in_their_turn(http):
    question = "[[reply:one]][[reply2:two]]"
    assert await http.chat(question) == "one"
    assert await http.chat(question, "one", "and?") == "two"
    assert await http.chat(question, "one", "and?", "two", "more?") == "more?"


async def test_a_directive_fails_a_prompt_so_many_times(http):
    answers = [(await http.post("/v1/completions", prompt="[[fail:502:2]] x"))[0] for _ in range(4)]
    assert answers == [502, 502, 200, 200]


async def test_ids_on_both_sides_of_a_completion(http):
    _, rendered = await http.post("/tokenize", messages=[{"role": "user", "content": "[[reply:the end]]"}])
    status, answer = await http.post(
        "/v1/completions", prompt=rendered["tokens"], return_token_ids=True, logprobs=0, max_tokens=50
    )
    choice = answer["choices"][0]
    assert status == 200
    assert choice["prompt_token_ids"] == rendered["tokens"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == answer["usage"]["completion_tokens"]
    _, text = await http.post("/detokenize", tokens=choice["token_ids"])
    assert text["prompt"] == "the end<|im_end|>"


async def test_chat_returns_ids_as_vllm_does(http):
    messages = [{"role": "user", "content": [{"type": "text", "text": "[[reply:yes]]"}]}]
    _, answer = await http.post("/v1/chat/completions", messages=messages, return_token_ids=True, logprobs=True)
    choice = answer["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    _, text = await http.post("/detokenize", tokens=answer["prompt_token_ids"])
    assert text["prompt"].endswith("<|im_start|>user\n[[reply:yes]]<|im_end|>\n<|im_start|>assistant\n")


async def test_an_excluded_stop_string_is_cut_from_the_text_but_not_from_the_ids(http):
    _, answer = await http.post(
        "/v1/completions", prompt="[[reply:ab STOP cd]]", stop="STOP", return_token_ids=True, max_tokens=50
    )
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab ", "stop", "STOP")
    assert (await http.post("/detokenize", tokens=choice["token_ids"]))[1]["prompt"].startswith("ab STOP")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [10**9]}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 10**6}),
        ("/v1/chat/completions", {"messages": []}),
        ("/control", {"fail_nxt": 1}),
    ],
)
async def test_bad_requests_are_refused(http, path, body):
    status, answer = await http.post(path, **body)
    assert status == 400
    assert answer["error"]["message"]


async def test_failures_are_switched_on_over_http(http, server):
    status, state = await http.post("/control", fail_next=1, status=500, healthy=False)
    assert (status, state["fail_next"]) == (200, 1)
    assert (await http.get("/health"))[0] == 503
    assert (await http.post("/v1/completions", prompt="x"))[0] == 500
    assert (await http.post("/v1/completions", prompt="x"))[0] == 200
    assert json.loads((await http.get("/control"))[1])["fail_next"] == 0


async def test_metrics_and_load_speak_vllms_names(http, server):
    await http.post("/v1/completions", prompt="hello")
    _, metrics = await http.get("/metrics")
    assert 'vllm:num_requests_running{engine="0",model_name="scripted"} 0.0' in metrics
    assert float(re.search(r"vllm:generation_tokens_total{.*} (\S+)", metrics)[1]) == server.generated_tokens > 0
    assert json.loads((await http.get("/load"))[1]) == {"server_load": 0}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "rollouts.llm.scripted", "--script", "echo", "--die-with-parent"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"SCRIPTED_API_KEY": "k"}
    )
    with process:
        yield process
        process.kill()


async def test_the_process_tells_its_url_once_it_listens_and_ends_on_sigterm(process):
    ready = json.loads(process.stdout.readline())
    async with aiohttp.ClientSession() as session, session.get(ready["url"] + "/v1/models") as response:
        assert response.status == 401
        async with session.get(ready["url"] + "/v1/models", headers={"Authorization": "Bearer k"}) as response:
            assert (await response.json())["data"][0]["id"] == ready["model"]
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert time.monotonic() - started < 2


def test_the_process_ends_with_its_stdin(process):
    json.loads(process.stdout.readline())
    process.stdin.close()
    assert process.wait(5) == 0
