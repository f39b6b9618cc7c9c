"""Runs and groups over HTTP."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from pytest_django import DjangoAssertNumQueries

from rollouts.api import bodies
from rollouts.models import Group, Rollout, Run
from tests.integration.api_case import ApiCase, expect_problem


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


def test_a_run_is_created_with_complete_settings(case: ApiCase) -> None:
    body = {"name": "grpo", "policy": "tiny", "priority": 70, "settings": {"sampling": {"temperature": 0.5}}}
    answer = case.submitter.post("/api/v1/runs/", body)
    assert answer.status_code == 201
    run = answer.json()
    assert (run["name"], run["policy"], run["priority"]) == ("grpo", "tiny", 70)
    assert run["settings"]["sampling"] == {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_tokens": 512, "stop": []}
    assert case.owner.get(f"/api/v1/runs/{run['id']}/").json()["progress"] == 0


def test_only_submit_keys_create_runs(case: ApiCase) -> None:
    case.check_write_access("post", "/api/v1/runs/", {"name": "grpo", "policy": "tiny"}, own=False)
    case.check_list_access("/api/v1/runs/")


def test_a_run_shows_its_counts_and_progress(case: ApiCase) -> None:
    case.domain.submit(n=3)
    case.domain.run.refresh_from_db()
    case.owner.post(f"/api/v1/rollouts/{Rollout.objects.first().id}/cancel/")
    run = case.check_read_access(f"/api/v1/runs/{case.domain.run.id}/")
    assert run["counts"]["queued"] == 2
    assert run["counts"]["cancelled"] == 1
    assert run["counts"]["running"] == 0
    assert run["progress"] == pytest.approx(1 / 3)


def test_a_list_shows_only_the_own_project(case: ApiCase) -> None:
    [run] = case.owner.get("/api/v1/runs/").json()["results"]
    assert run["id"] == str(case.domain.run.id)
    [run] = case.stranger.get("/api/v1/runs/").json()["results"]
    assert run["id"] == str(case.other.run.id)


def test_cancelling_a_run_ends_its_rollouts_and_closes_it(case: ApiCase) -> None:
    case.domain.submit(n=2)
    path = f"/api/v1/runs/{case.domain.run.id}/"
    case.check_write_access("post", f"{path}cancel/")
    assert case.submitter.post(f"{path}cancel/").json() == {"cancelled": 2}
    assert case.submitter.post(f"{path}cancel/").json() == {"cancelled": 0}
    assert case.owner.get(path).json()["cancelled_at"] is not None
    group = {"n": 1, "dataset": "sums", "key": "one"}
    expect_problem(case.submitter.post(f"{path}groups/", {"groups": [group]}), 409, "conflict")


def test_groups_queue_rollouts_of_tasks_named_in_three_ways(case: ApiCase) -> None:
    path = f"/api/v1/runs/{case.domain.run.id}/groups/"
    groups = [
        {"n": 2, "task_id": str(case.domain.task.id)},
        {"n": 1, "dataset": "sums", "key": "one"},
        {"n": 3, "environment": "sums", "payload": {"a": 4, "b": 5}},
    ]
    answer = case.submitter.post(path, {"groups": groups})
    assert answer.status_code == 201, answer.content
    submitted = answer.json()["groups"]
    assert [group["n"] for group in submitted] == [2, 1, 3]
    assert submitted[0]["task"] == submitted[1]["task"] == str(case.domain.task.id)
    assert Rollout.objects.filter(run=case.domain.run, state="queued").count() == 6

    listed = case.check_read_access(path)["results"]
    assert {group["id"] for group in listed} == {group["id"] for group in submitted}
    assert {group["id"]: group["counts"]["queued"] for group in listed} == {group["id"]: group["n"] for group in submitted}


def test_groups_are_refused_without_the_right_key(case: ApiCase) -> None:
    group = {"n": 1, "task_id": str(case.domain.task.id)}
    case.check_write_access("post", f"/api/v1/runs/{case.domain.run.id}/groups/", {"groups": [group]})


def test_a_group_can_be_looked_at_and_cancelled(case: ApiCase) -> None:
    group_id = case.domain.submit(n=4)[0].group_id
    path = f"/api/v1/groups/{group_id}/"
    group = case.check_read_access(path)
    assert (group["n"], group["task_key"], group["dataset"]) == (4, "one", "sums")
    case.check_write_access("post", f"{path}cancel/")
    assert case.submitter.post(f"{path}cancel/").json() == {"cancelled": 4}
    assert case.owner.get(path).json()["counts"]["cancelled"] == 4


GOOD = {"n": 1, "dataset": "sums", "key": "one"}


@pytest.mark.parametrize(
    ("group", "pointer"),
    [
        ({"n": 1, "environment": "no-such", "payload": {}}, "/groups/1/environment"),
        ({"n": 1, "environment": "sums", "payload": {"a": "x", "b": 1}}, "/groups/1/payload/a"),
        ({**GOOD, "n": 0}, "/groups/1/n"),
        ({**GOOD, "n": -1}, "/groups/1/n"),
        ({**GOOD, "n": 1025}, "/groups/1/n"),
        ({**GOOD, "n": "2"}, "/groups/1/n"),
        ({**GOOD, "n": 2.5}, "/groups/1/n"),
        ({**GOOD, "n": True}, "/groups/1/n"),
        ({**GOOD, "n": None}, "/groups/1/n"),
        ({"dataset": "sums", "key": "one"}, "/groups/1/n"),
        ({**GOOD, "key": "two"}, "/groups/1/key"),
        ({**GOOD, "key": "one\0"}, "/groups/1/key"),
        ({**GOOD, "kye": "one"}, "/groups/1/kye"),
        ({"n": 1, "task_id": str(uuid.uuid4())}, "/groups/1/task_id"),
        ({"n": 1, "task_id": "one"}, "/groups/1/task_id"),
        ({"n": 1, "task_id": 7}, "/groups/1/task_id"),
        ({"n": 1}, "/groups/1"),
        ({**GOOD, "task_id": str(uuid.UUID(int=1))}, "/groups/1"),
        ([], "/groups/1"),
        ("one", "/groups/1"),
    ],
)
def test_one_bad_group_refuses_all_and_is_named(case: ApiCase, group: Any, pointer: str) -> None:
    before = case.row_counts()
    answer = case.submitter.post(f"/api/v1/runs/{case.domain.run.id}/groups/", {"groups": [GOOD, group]})
    expect_problem(answer, 422, "invalid", pointer)
    assert case.row_counts() == before


def test_another_projects_task_is_no_task(case: ApiCase) -> None:
    before = case.row_counts()
    group = {"n": 1, "task_id": str(case.other.task.id)}
    answer = case.submitter.post(f"/api/v1/runs/{case.domain.run.id}/groups/", {"groups": [group]})
    expect_problem(answer, 422, "invalid", "/groups/0/task_id")
    assert case.row_counts() == before


@pytest.mark.parametrize("body", [{"groups": []}, {}, {"groups": {}}, {"groups": None}, [], None, "groups"])
def test_bodies_without_groups_are_refused(case: ApiCase, body: Any) -> None:
    answer = case.submitter.post(f"/api/v1/runs/{case.domain.run.id}/groups/", body)
    expect_problem(answer, 422, "invalid")


def test_too_many_groups_are_refused(case: ApiCase, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [GOOD] * (bodies.MAX_GROUPS + 1)
    answer = case.submitter.post(f"/api/v1/runs/{case.domain.run.id}/groups/", {"groups": groups})
    expect_problem(answer, 422, "invalid", "/groups")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"name": ""}, "/name"),
        ({"name": 5}, "/name"),
        ({"name": "x" * 121}, "/name"),
        ({"policy": "no-such"}, "/policy"),
        ({"policy": "no such"}, "/policy"),
        ({"priority": 101}, "/priority"),
        ({"priority": "50"}, "/priority"),
        ({"settings": {"sampling": {"temperature": -1}}}, "/settings/sampling/temperature"),
        ({"settings": {"samplign": {}}}, "/settings/samplign"),
        ({"settings": {"on_agent_timeout": "panic"}}, "/settings/on_agent_timeout"),
        ({"settings": []}, "/settings"),
        ({"colour": "red"}, "/colour"),
    ],
)
def test_a_wrong_run_is_refused_and_the_field_named(case: ApiCase, change: dict[str, Any], pointer: str) -> None:
    before = case.row_counts()
    answer = case.submitter.post("/api/v1/runs/", {"name": "grpo", "policy": "tiny"} | change)
    expect_problem(answer, 422, "invalid", pointer)
    assert case.row_counts() == before


def test_lists_take_the_same_queries_whatever_their_length(
    case: ApiCase, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    case.owner.get("/api/v1/runs/")  # notes the key's use, which is not repeated within a minute
    groups_path = f"/api/v1/runs/{case.domain.run.id}/groups/"
    for size in (1, 12):
        Run.objects.bulk_create(Run(project=case.domain.project, name="r", policy=case.domain.policy) for _ in range(size))
        for _ in range(size):
            case.domain.submit(n=2)
        with django_assert_num_queries(2):  # key, runs
            assert len(case.owner.get("/api/v1/runs/").json()["results"]) >= size
        with django_assert_num_queries(4):  # key, run, groups, counts
            assert len(case.owner.get(groups_path).json()["results"]) >= size
    assert Group.objects.count() == 13
