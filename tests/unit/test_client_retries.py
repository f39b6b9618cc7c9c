"""How the client meets failures: what it repeats, how long it waits, when it gives up. The other end is a script."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from rollouts.client import ApiError, AsyncClient, Client, FieldError

Answer = httpx.Response | Exception
RUN = {"id": "r1", "counts": {"queued": 0, "succeeded": 2}, "progress": 1.0}


def problem(status: int, code: str, **headers: str) -> httpx.Response:
    body = {"code": code, "detail": "no", "status": status, "errors": [{"pointer": "/n", "detail": "Too small."}]}
    return httpx.Response(status, json=body, headers={"Content-Type": "application/problem+json", **headers})


class Script:
    """Gives one answer after the other, and keeps the requests and the pauses between them."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = iter(answers)
        self.requests: list[httpx.Request] = []
        self.pauses: list[float] = []
        self.now = 0.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Client, Script]]]:
    """A client that talks to a script, on a clock that only its own pauses move."""
    clients: list[Client] = []

    def start(*answers: Answer, **options: Any) -> tuple[Client, Script]:
        script = Script(*answers)
        monkeypatch.setattr(time, "sleep", script.sleep)
        monkeypatch.setattr(time, "monotonic", lambda: script.now)
        client = Client("http://server.test", "prl_x_y", transport=httpx.MockTransport(script), **options)
        clients.append(client)
        return client, script

    yield start
    monkeypatch.undo()
    for client in clients:
        client.close()


Play = Callable[..., tuple[Client, Script]]


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("cut off"),
        *map(httpx.Response, (429, 500, 502, 503, 504)),
    ],
    ids=str,
)
def test_failures_are_repeated(play: Play, failure: Answer) -> None:
    client, script = play(failure, failure, httpx.Response(200, json=RUN))
    assert client.run("r1") == RUN
    assert len(script.requests) == 3
    assert 0.1 <= script.pauses[0] <= 0.25 < script.pauses[1] * 1.01 <= 0.51


def test_a_repeated_creation_keeps_its_idempotency_key(play: Play) -> None:
    client, script = play(httpx.ReadTimeout("slow"), httpx.Response(201, json=RUN), httpx.Response(201, json=RUN))
    client.create_run("grpo", "tiny")
    client.create_run("grpo", "tiny")
    first, second, other = (request.headers["Idempotency-Key"] for request in script.requests)
    assert first == second != other
    assert script.requests[0].content == script.requests[1].content


def test_a_creation_still_at_work_is_asked_for_again(play: Play) -> None:
    client, script = play(
        httpx.ReadTimeout("slow"),
        problem(409, "idempotency_in_progress", **{"Retry-After": "1"}),
        httpx.Response(201, json=RUN),
    )
    assert client.create_run("grpo", "tiny") == RUN
    assert script.pauses[1] >= 1


def test_retry_after_is_obeyed(play: Play) -> None:
    client, script = play(httpx.Response(429, headers={"Retry-After": "7"}), httpx.Response(200, json=RUN))
    client.run("r1")
    assert 7 <= script.pauses[0] <= 7.25


def test_retry_after_may_be_a_date(play: Play) -> None:
    then = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    client, script = play(httpx.Response(503, headers={"Retry-After": then}), httpx.Response(200, json=RUN))
    client.run("r1")
    assert 18 <= script.pauses[0] <= 20.5


@pytest.mark.parametrize("value", ["soon", "-1", "1.5.0", "²"])
def test_a_senseless_retry_after_is_ignored(play: Play, value: str) -> None:
    headers = httpx.Headers([(b"Retry-After", value.encode())])
    client, script = play(httpx.Response(503, headers=headers), httpx.Response(200, json=RUN))
    client.run("r1")
    assert script.pauses[0] <= 0.25


def test_patience_ends_with_the_last_failure(play: Play) -> None:
    client, script = play(*[httpx.ConnectError("refused")] * 100, patience=20)
    with pytest.raises(httpx.ConnectError):
        client.run("r1")
    assert script.now <= 20
    client, script = play(*[problem(503, "unavailable")] * 100, patience=20)
    with pytest.raises(ApiError) as raised:
        client.run("r1")
    assert raised.value.code == "unavailable"
    assert 10 <= script.now <= 20


def test_a_wait_longer_than_the_patience_is_not_begun(play: Play) -> None:
    client, script = play(httpx.Response(503, headers={"Retry-After": "3600"}), patience=20)
    with pytest.raises(ApiError):
        client.run("r1")
    assert script.pauses == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
def test_refusals_are_raised_at_once(play: Play, status: int) -> None:
    client, script = play(problem(status, "some_code"))
    with pytest.raises(ApiError, match=r"/n: Too small\.") as raised:
        client.run("r1")
    assert (raised.value.status, raised.value.code, raised.value.detail) == (status, "some_code", "no")
    assert raised.value.errors == [FieldError("/n", "Too small.")]
    assert len(script.requests) == 1


def test_an_answer_that_is_not_the_apis_is_an_error_too(play: Play) -> None:
    client, _ = play(httpx.Response(404, text="<h1>nginx</h1>"), httpx.Response(302, headers={"Location": "/login/"}))
    for code in ("http_404", "http_302"):
        with pytest.raises(ApiError) as raised:
            client.run("r1")
        assert raised.value.code == code


def test_results_go_on_with_the_cursor_after_a_broken_connection(play: Play) -> None:
    client, script = play(
        httpx.Response(200, json={"results": [{"id": "1"}], "next": "c1", "done": False}),
        httpx.ReadError("cut off"),
        httpx.Response(200, json={"results": [], "next": "c1", "done": False}),
        httpx.Response(200, json={"results": [{"id": "2"}], "next": "c2", "done": True}),
    )
    assert [result["id"] for result in client.iter_results("r1", wait=5)] == ["1", "2"]
    asked = [request.url.params for request in script.requests]
    assert [params["after"] for params in asked] == ["", "c1", "c1", "c1"]
    assert all(params["wait"] == "5" for params in asked)


def test_lists_follow_their_pages(play: Play) -> None:
    client, script = play(
        httpx.Response(200, json={"results": [1, 2], "next": "/prefix/api/v1/rollouts/?cursor=abc%3D&state=queued"}),
        httpx.Response(200, json={"results": [3], "next": None}),
    )
    assert list(client.iter_rollouts(state="queued", trainable=True)) == [1, 2, 3]
    assert [request.url.path for request in script.requests] == ["/api/v1/rollouts/"] * 2
    assert dict(script.requests[1].url.params) == {"state": "queued", "trainable": "true", "cursor": "abc="}


def test_waiting_for_a_run_ends_with_its_last_rollout(play: Play) -> None:
    going = {**RUN, "counts": {"queued": 0, "running": 1, "succeeded": 1}, "progress": 0.5}
    client, script = play(httpx.Response(200, json=going), httpx.Response(200, json=going), httpx.Response(200, json=RUN))
    assert client.wait("r1", poll=2) == RUN
    assert script.pauses == [2, 2]
    client, script = play(*[httpx.Response(200, json=going)] * 10)
    with pytest.raises(TimeoutError, match="50%"):
        client.wait("r1", timeout=5, poll=2)
    assert script.now <= 5


def test_ids_cannot_leave_their_place_in_the_path(play: Play) -> None:
    client, script = play(httpx.Response(200, json=RUN))
    client.run("../../admin?x=1")
    assert script.requests[0].url.raw_path == b"/api/v1/runs/..%2F..%2Fadmin%3Fx%3D1/"


def test_the_server_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_URL", "http://from-env.test")
    monkeypatch.setenv("PRORL_API_KEY", "prl_from_env")
    script = Script(httpx.Response(200, json=RUN))
    with Client(transport=httpx.MockTransport(script)) as client:
        client.run("r1")
        assert "prl_from_env" not in repr(client)
    assert script.requests[0].url.host == "from-env.test"
    assert script.requests[0].headers["Authorization"] == "Bearer prl_from_env"
    monkeypatch.delenv("PRORL_API_KEY")
    with pytest.raises(ValueError, match="PRORL_API_KEY"):
        Client()
    monkeypatch.delenv("PRORL_URL")
    with pytest.raises(ValueError, match="PRORL_URL"):
        AsyncClient()


def test_both_clients_offer_the_same() -> None:
    def methods(kind: type) -> dict[str, list[tuple[str, Any]]]:
        public = {name: member for name, member in vars(kind).items() if not name.startswith("_")}
        return {name: [(p.name, p.default) for p in inspect.signature(m).parameters.values()] for name, m in public.items()}

    assert methods(Client) == methods(AsyncClient)


async def test_the_asynchronous_client_repeats_alike() -> None:
    script = Script(
        httpx.ConnectError("refused"),
        httpx.Response(503, headers={"Retry-After": "0"}),
        httpx.Response(201, json={"groups": [{"id": "g1"}]}),
        httpx.Response(200, json={"results": [{"id": "1"}], "next": "c1", "done": False}),
        httpx.Response(200, json={"results": [{"id": "2"}], "next": "c2", "done": True}),
        httpx.Response(200, json={"results": [3], "next": "/x?cursor=c"}),
        httpx.Response(200, json={"results": [4], "next": None}),
        httpx.Response(200, json={"cancelled": 2}),
        httpx.Response(200, json=RUN),
        problem(404, "not_found"),
    )
    async with AsyncClient("http://server.test", "prl_x_y", transport=httpx.MockTransport(script)) as client:
        assert await client.submit_groups("r1", [{"n": 1, "task_id": "t1"}]) == [{"id": "g1"}]
        assert [result["id"] async for result in client.iter_results("r1")] == ["1", "2"]
        assert [group async for group in client.iter_groups("r1")] == [3, 4]
        assert await client.cancel_run("r1") == 2
        assert await client.wait("r1") == RUN
        with pytest.raises(ApiError):
            await client.rollout("r9")
    assert json.loads(script.requests[0].content) == {"groups": [{"n": 1, "task_id": "t1"}]}
    assert len({request.headers["Idempotency-Key"] for request in script.requests[:3]}) == 1
