"""LLM servers over HTTP. Registration probes a real (scripted) server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.forms import model_to_dict
from pytest_django import DjangoAssertNumQueries

from rollouts.llm.scripted.server import ScriptedServer
from rollouts.models import LLMServer
from tests.integration.api_case import ApiCase, expect_problem
from tests.services.model_servers import served

SERVERS = "/api/v1/llm-servers/"


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


@pytest.fixture(scope="module")
def model_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer(api_key="hush")
    with served(server):
        yield server


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


def test_a_server_whose_model_sees_has_the_feature(case: ApiCase) -> None:
    with served(server := ScriptedServer(pictures=True)):
        answer = case.owner.post(SERVERS, {"url": server.url, "policy": "tiny"})
    assert answer.status_code == 201, answer.content
    assert "pictures" in answer.json()["features"]
    assert answer.json()["capabilities"]["picture_id"] == server.picture_id


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


def registered() -> LLMServer:
    """The one that a test has registered, not those of the domains."""
    return LLMServer.objects.exclude(url__startswith="http://llm.test/").get()


class TestChanges:
    @pytest.fixture
    def path(self, case: ApiCase, model_server: ScriptedServer) -> str:
        body = {"url": model_server.url, "policy": "tiny", "api_key": "hush", "capacity": 5}
        return f"{SERVERS}{case.owner.post(SERVERS, body).json()['id']}/"

    def test_everything_that_can_be_changed(self, case: ApiCase, path: str) -> None:
        changed = case.owner.patch(path, {"capacity": 7, "policy_version": 4, "tool_format": "hermes", "state": "draining"})
        assert changed.status_code == 200, changed.content
        server = changed.json()
        assert (server["capacity"], server["policy_version"], server["tool_format"]) == (7, 4, "hermes")
        assert (server["state"], server["admission"], server["health"]) == ("draining", "draining", "live")
        assert case.owner.patch(path, {}).json()["capacity"] == 7

    def test_a_new_key_is_tried_first(self, case: ApiCase, path: str) -> None:
        expect_problem(case.owner.patch(path, {"api_key": "wrong", "capacity": 9}), 503, "unavailable", "/url")
        assert registered().capacity == 5
        assert case.owner.patch(path, {"api_key": "hush"}).status_code == 200

    @pytest.mark.parametrize(
        ("change", "pointer"),
        [
            ({"capacity": 0}, "/capacity"),
            ({"policy_version": -1}, "/policy_version"),
            ({"tool_format": "unheard-of"}, "/tool_format"),
            ({"tokenizer": "/no-such-directory"}, "/tokenizer"),
            ({"state": "suspect"}, "/state"),
        ],
    )
    def test_what_is_wrong_changes_nothing(self, case: ApiCase, path: str, change: dict[str, Any], pointer: str) -> None:
        before = model_to_dict(registered())
        expect_problem(case.owner.patch(path, {"capacity": 3} | change), 422, "invalid", pointer)
        assert model_to_dict(registered()) == before

    def test_one_with_unknown_weights_comes_back_when_they_are_known(self, case: ApiCase, path: str) -> None:
        LLMServer.objects.update(admission="paused", weights_unknown=True)
        expect_problem(case.owner.patch(path, {"state": "live"}), 409, "conflict", "/state")
        server = case.owner.patch(path, {"state": "live", "policy_version": 6}).json()
        assert (server["state"], server["policy_version"]) == ("live", 6)
        assert not registered().weights_unknown

    def test_under_a_weight_update_its_version_stays(self, case: ApiCase, path: str) -> None:
        LLMServer.objects.update(hold="wait")
        expect_problem(case.owner.patch(path, {"policy_version": 6}), 409, "conflict", "/policy_version")

    def test_sleep_and_wake(self, case: ApiCase, path: str, model_server: ScriptedServer) -> None:
        for action in ("sleep", "wake"):
            case.check_write_access("post", f"{path}{action}/", {})
        expect_problem(case.owner.post(f"{path}wake/", {}), 409, "conflict")
        assert case.submitter.post(f"{path}sleep/", {"level": 2}).json()["state"] == "asleep"
        expect_problem(case.owner.post(f"{path}sleep/", {}), 409, "conflict")
        expect_problem(case.owner.patch(path, {"state": "live"}), 409, "conflict", "/state")
        assert case.submitter.post(f"{path}wake/", {"tags": ["weights"]}).json()["state"] == "asleep"
        assert case.submitter.post(f"{path}wake/", {"tags": ["kv_cache"]}).json()["state"] == "live"

    def test_a_server_that_cannot_sleep_is_not_told_to(self, case: ApiCase, path: str) -> None:
        LLMServer.objects.update(capabilities={"features": []})
        for action in ("sleep", "wake"):
            expect_problem(case.owner.post(f"{path}{action}/", {}), 409, "conflict")


class TestTextOnly:
    @pytest.fixture
    def without_ids(self, model_server: ScriptedServer) -> Iterator[dict[str, Any]]:
        model_server.switches.omit_token_ids = True
        yield {"url": model_server.url, "policy": "tiny", "api_key": "hush"}
        model_server.switches.omit_token_ids = False

    def test_it_is_refused_with_what_is_missing(self, case: ApiCase, without_ids: dict[str, Any]) -> None:
        problem = expect_problem(case.owner.post(SERVERS, without_ids), 422, "invalid", "/url")
        assert "token ids" in problem["errors"][0]["detail"]
        assert "allow_text_only" in problem["errors"][0]["detail"]
        assert "/tokenize" not in problem["errors"][0]["detail"]

    def test_unless_it_is_wanted(self, case: ApiCase, without_ids: dict[str, Any]) -> None:
        answer = case.owner.post(SERVERS, without_ids | {"allow_text_only": True})
        assert answer.status_code == 201, answer.content
        assert "token_ids" not in answer.json()["features"]
        assert "tokenize" in answer.json()["features"]

    def test_the_context_can_be_made_smaller_and_not_larger(self, case: ApiCase, model_server: ScriptedServer) -> None:
        body = {"url": model_server.url, "policy": "tiny", "api_key": "hush"}
        small = case.owner.post(SERVERS, body | {"max_model_len": 100}).json()
        assert small["max_model_len"] == 100
        assert case.owner.delete(f"{SERVERS}{small['id']}/").status_code == 204
        large = case.owner.post(SERVERS, body | {"max_model_len": 10**6}).json()
        assert large["max_model_len"] == model_server.max_model_len
