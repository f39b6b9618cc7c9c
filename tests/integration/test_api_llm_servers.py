"""LLM servers over HTTP. Registration probes a real (scripted) server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import DjangoAssertNumQueries

from rollouts.llm.scripted.server import ScriptedServer
from rollouts.models import LLMServer
from tests.integration.api_case import ApiCase, expect_problem

SERVERS = "/api/v1/llm-servers/"


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


@pytest.fixture(scope="module")
def model_server() -> Iterator[ScriptedServer]:
    """Runs beside the tests, since the view probes it from a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ScriptedServer(api_key="hush")
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
    yield server
    asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_server_is_probed_registered_paused_and_removed(case: ApiCase, model_server: ScriptedServer) -> None:
    body = {"url": model_server.url, "policy": "tiny", "policy_version": 3, "capacity": 5, "api_key": "hush"}
    answer = case.owner.post(SERVERS, body)
    assert answer.status_code == 201, answer.content
    server = answer.json()
    assert (server["model"], server["max_model_len"]) == (model_server.model, model_server.max_model_len)
    assert (server["policy"], server["policy_version"], server["capacity"], server["state"]) == ("tiny", 3, 5, "live")

    path = f"{SERVERS}{server['id']}/"
    assert case.check_read_access(path) == server
    case.check_write_access("patch", path, {"state": "paused"}, needs="admin")
    assert case.owner.patch(path, {"state": "paused"}).json()["state"] == "paused"
    expect_problem(case.owner.patch(path, {"state": "dead"}), 422, "invalid", "/state")
    expect_problem(case.owner.patch(path, {"url": "http://elsewhere"}), 422, "invalid", "/url")
    case.check_write_access("delete", path, needs="admin")
    assert case.owner.delete(path).status_code == 204
    expect_problem(case.owner.get(path), 404, "not_found")


def test_the_key_of_a_server_is_never_shown(case: ApiCase, model_server: ScriptedServer) -> None:
    body = {"url": model_server.url, "policy": "tiny", "api_key": "hush"}
    answer = case.owner.post(SERVERS, body, HTTP_IDEMPOTENCY_KEY="k1")
    assert LLMServer.objects.get(id=answer.json()["id"]).api_key == "hush"
    replayed = case.owner.post(SERVERS, body, HTTP_IDEMPOTENCY_KEY="k1")
    for shown in (answer, replayed, case.owner.get(SERVERS), case.owner.get(f"{SERVERS}{answer.json()['id']}/")):
        assert shown.status_code in (200, 201)
        assert b"hush" not in shown.content
    assert answer.json()["has_api_key"] is True


def test_only_admin_keys_register_servers(case: ApiCase, model_server: ScriptedServer) -> None:
    case.check_write_access("post", SERVERS, {"url": model_server.url, "policy": "tiny"}, needs="admin", own=False)
    case.check_list_access(SERVERS)


def test_a_server_that_does_not_answer_is_not_registered(case: ApiCase) -> None:
    before = case.row_counts()
    answer = case.owner.post(SERVERS, {"url": "http://127.0.0.1:9", "policy": "tiny"})
    expect_problem(answer, 503, "unavailable", "/url")
    assert answer.headers["Retry-After"] == "1"
    assert case.row_counts() == before


def test_a_server_is_registered_once(case: ApiCase, model_server: ScriptedServer) -> None:
    body = {"url": model_server.url, "policy": "tiny", "api_key": "hush"}
    assert case.owner.post(SERVERS, body).status_code == 201
    expect_problem(case.owner.post(SERVERS, body), 409, "conflict", "/url")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"model": "no-such"}, "/model"),
        ({"capacity": 0}, "/capacity"),
        ({"capacity": 2**40}, "/capacity"),
        ({"policy_version": -1}, "/policy_version"),
        ({"policy": "two words"}, "/policy"),
        ({"policy": None}, "/policy"),
        ({"url": ""}, "/url"),
        ({"state": "live"}, "/state"),
    ],
)
def test_a_wrong_server_is_refused(case: ApiCase, model_server: ScriptedServer, change: dict[str, Any], pointer: str) -> None:
    before = case.row_counts()
    body = {"url": model_server.url, "policy": "tiny", "api_key": "hush"} | change
    expect_problem(case.owner.post(SERVERS, body), 422, "invalid", pointer)
    assert case.row_counts() == before


def test_the_list_takes_the_same_queries_whatever_its_length(
    case: ApiCase, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    case.reader.get(SERVERS)  # notes the key's use, which is not repeated within a minute
    for size in (1, 20):
        LLMServer.objects.bulk_create(
            LLMServer(
                project=case.domain.project, policy=case.domain.policy, url=f"http://s{size}-{i}", model="m", max_model_len=1
            )
            for i in range(size)
        )
        with django_assert_num_queries(2):  # key, servers
            assert len(case.reader.get(SERVERS).json()["results"]) > size
