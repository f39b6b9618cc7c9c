"""Policies over HTTP: announced versions, waiting for them, and who may do so."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollouts.client import Client
from rollouts.models import LLMServer, PolicyVersion
from rollouts.services.announcements import begin, note_ready
from rollouts.services.policies import announce_version
from tests.integration.api_case import ApiCase, expect_problem, secret_for
from tests.integration.domain import Domain

POLICIES = "/api/v1/policies/"
VERSIONS = f"{POLICIES}tiny/versions/"
EXTERNAL = {"version": 1, "source": {"kind": "external"}}


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


@pytest.fixture
def client(server_url: str) -> Iterator[Client]:
    domain = Domain()
    with Client(server_url, secret_for(domain.project, "submit")) as client:
        yield client


def ready(version: PolicyVersion) -> None:
    """As the executor brings it there, with nobody who calls."""
    begin(version.pk)
    note_ready(version.pk)


def test_policies_are_made_listed_and_shown(case: ApiCase) -> None:
    case.check_write_access("post", POLICIES, {"name": "second"}, needs="admin", own=False)
    made = case.owner.post(POLICIES, {"name": "second"})
    assert made.status_code == 201
    assert (made.json()["name"], made.json()["version"]) == ("second", 0)
    expect_problem(case.owner.post(POLICIES, {"name": "second"}), 409, "conflict", "/name")
    expect_problem(case.owner.post(POLICIES, {"name": "two words"}), 422, "invalid", "/name")
    case.check_list_access(POLICIES)
    assert {policy["name"] for policy in case.reader.get(POLICIES).json()["results"]} == {"tiny", "second"}

    shown = case.reader.get(f"{POLICIES}tiny/").json()
    assert [server["id"] for server in shown["servers"]] == [str(case.domain.server.pk)]
    assert shown["announcement"] is None
    expect_problem(case.reader.get(f"{POLICIES}third/"), 404, "not_found")
    assert case.stranger.get(f"{POLICIES}tiny/").json()["id"] != shown["id"]  # theirs has the same name
    expect_problem(case.stranger.get(f"{POLICIES}second/"), 404, "not_found")


def test_a_version_is_announced_once(case: ApiCase) -> None:
    case.check_write_access("post", VERSIONS, EXTERNAL, own=False)
    announced = case.submitter.post(VERSIONS, EXTERNAL)
    assert announced.status_code == 202
    assert (announced.json()["version"], announced.json()["mode"], announced.json()["state"]) == (1, "drain", "announced")
    assert case.submitter.post(VERSIONS, EXTERNAL).json() == announced.json()
    assert case.submitter.get(f"{POLICIES}tiny/").json()["announcement"] == announced.json()
    case.check_list_access(VERSIONS)
    assert case.reader.get(VERSIONS).json()["results"] == [announced.json()]
    assert case.reader.get(f"{VERSIONS}1/").json() == announced.json()
    assert case.stranger.get(VERSIONS).json()["results"] == []
    expect_problem(case.stranger.get(f"{VERSIONS}1/"), 404, "not_found")


@pytest.mark.parametrize(
    ("change", "status", "pointer"),
    [
        ({"version": 0}, 422, "/version"),
        ({"version": "1"}, 422, "/version"),
        ({"mode": "wait"}, 422, "/mode"),
        ({"source": {"kind": "ftp"}}, 422, "/source"),
        ({"source": {"kind": "path"}}, 422, "/source/path"),
        ({"source": {"kind": "path", "path": "/w"}}, 422, "/source/kind"),  # the server was never probed for it
        ({"weights": "/w"}, 422, "/weights"),
    ],
)
def test_a_wrong_announcement_changes_nothing(case: ApiCase, change: dict[str, object], status: int, pointer: str) -> None:
    expect_problem(case.submitter.post(VERSIONS, EXTERNAL | change), status, "invalid", pointer)
    assert not PolicyVersion.objects.exists()


def test_versions_rise(case: ApiCase) -> None:
    assert case.submitter.post(VERSIONS, EXTERNAL | {"version": 5}).status_code == 202
    expect_problem(case.submitter.post(VERSIONS, EXTERNAL | {"version": 4}), 422, "invalid", "/version")
    expect_problem(case.submitter.post(VERSIONS, EXTERNAL | {"version": 5, "mode": "abort"}), 409, "conflict", "/version")
    LLMServer.objects.filter(project=case.domain.project).delete()
    expect_problem(case.submitter.post(VERSIONS, EXTERNAL | {"version": 6}), 409, "conflict")


def test_external_weights_are_reported_in_place(case: ApiCase) -> None:
    path = f"{VERSIONS}1/loaded/"
    version = announce_version(policy=case.domain.policy, version=1, mode="drain", source={"kind": "external"})
    expect_problem(case.submitter.post(path, {}), 409, "conflict")
    ready(version)
    case.check_write_access("post", path, {})
    stranger = str(case.other.server.pk)
    expect_problem(case.submitter.post(path, {"failed": {stranger: "?"}}), 422, "invalid", f"/failed/{stranger}")
    answer = case.submitter.post(path, {})
    assert (answer.status_code, answer.json()["state"]) == (200, "live")
    assert answer.json()["report"][str(case.domain.server.pk)]["state"] == "live"
    assert case.reader.get(f"{POLICIES}tiny/").json()["version"] == 1
    assert case.submitter.post(path, {}).json() == answer.json()


def test_a_group_may_require_a_version(case: ApiCase) -> None:
    path = f"/api/v1/runs/{case.domain.run.id}/groups/"
    group = {"n": 1, "task_id": str(case.domain.task.id)}
    answer = case.submitter.post(path, {"groups": [{**group, "require_policy_version": 1}, group]})
    assert answer.status_code == 201
    rollouts = case.reader.get("/api/v1/rollouts/").json()["results"]
    assert {rollout["required_version"] for rollout in rollouts} == {None, 1}
    refused = case.submitter.post(path, {"groups": [group, {**group, "require_policy_version": 2}]})
    expect_problem(refused, 422, "invalid", "/groups/1/require_policy_version")


def test_the_client_waits_for_a_version(client: Client) -> None:
    client.announce_version("tiny", 1, mode="abort")
    with pytest.raises(TimeoutError, match="is announced after"):
        client.wait_for_version("tiny", 1, timeout=0.1)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(client.wait_for_version, "tiny", 1, timeout=30)
        ready(PolicyVersion.objects.get())
        assert waiting.result(30)["state"] == "ready"
    assert client.weights_in_place("tiny", 1)["state"] == "live"
    assert client.wait_for_version("tiny", 1)["state"] == "live"
    assert [version["version"] for version in client.iter_versions("tiny")] == [1]
    assert [policy["version"] for policy in client.iter_policies()] == [1]
    assert client.policy("tiny")["servers"][0]["policy_version"] == 1
