"""Environments, datasets, tasks and policies over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from pytest_django import DjangoAssertNumQueries

from rollouts.models import Dataset, Environment, Policy, Task
from tests.integration.api_case import ApiCase, expect_problem


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


def test_an_environment_is_registered_in_versions_with_its_schemas(case: ApiCase) -> None:
    body = {"name": "more-sums", "handler": "arithmetic", "description": "Sums again"}
    first = case.owner.post("/api/v1/environments/", body)
    assert first.status_code == 201, first.content
    assert case.owner.post("/api/v1/environments/", body).json()["version"] == 2
    environment = case.check_read_access(f"/api/v1/environments/{first.json()['id']}/")
    assert environment == first.json()
    assert environment["task_schema"]["properties"]
    assert environment["config_schema"]["type"] == "object"


def test_only_admin_keys_register_environments(case: ApiCase) -> None:
    body = {"name": "more-sums", "handler": "arithmetic"}
    case.check_write_access("post", "/api/v1/environments/", body, needs="admin", own=False)
    case.check_list_access("/api/v1/environments/")


def test_an_environment_whose_handler_is_gone_can_still_be_read(case: ApiCase) -> None:
    gone = Environment.objects.create(project=case.domain.project, name="gone", handler="gone")
    environment = case.reader.get(f"/api/v1/environments/{gone.id}/").json()
    assert (environment["config_schema"], environment["task_schema"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"handler": "no-such"}, "/handler"),
        ({"handler": None}, "/handler"),
        ({"name": "two words"}, "/name"),
        ({"name": "line\n"}, "/name"),
        ({"config": {"no_such_setting": 1}}, "/config/no_such_setting"),
        ({"config": "none"}, "/config"),
        ({"version": 7}, "/version"),
        ({"description": "x" * 301}, "/description"),
    ],
)
def test_a_wrong_environment_is_refused(case: ApiCase, change: dict[str, Any], pointer: str) -> None:
    before = case.row_counts()
    answer = case.owner.post("/api/v1/environments/", {"name": "more-sums", "handler": "arithmetic"} | change)
    expect_problem(answer, 422, "invalid", pointer)
    assert case.row_counts() == before


def test_a_dataset_holds_tasks_and_flags_those_that_cannot_be_scored(case: ApiCase) -> None:
    dataset = case.submitter.post("/api/v1/datasets/", {"name": "easy", "environment": "sums"}).json()
    assert (dataset["environment"], dataset["environment_version"]) == ("sums", 1)
    path = f"/api/v1/datasets/{dataset['id']}/tasks/"
    tasks = [{"key": f"t{i}", "payload": {"a": i, "b": 1}} for i in range(3)]
    stored = case.submitter.post(path, {"tasks": tasks})
    assert stored.status_code == 201, stored.content
    assert [task["key"] for task in stored.json()["tasks"]] == ["t0", "t1", "t2"]
    Task.objects.filter(key="t1").update(quarantine_reason="the gold answer cannot be parsed")

    listed = case.check_read_access(path)["results"]
    assert {task["key"]: task["payload"]["a"] for task in listed} == {"t0": 0, "t1": 1, "t2": 2}
    [bad] = case.reader.get(f"{path}?quarantined=true").json()["results"]
    assert (bad["key"], bad["quarantined"], bad["quarantine_reason"]) == ("t1", True, "the gold answer cannot be parsed")
    assert {task["key"] for task in case.reader.get(f"{path}?quarantined=false").json()["results"]} == {"t0", "t2"}
    detail = case.check_read_access(f"/api/v1/datasets/{dataset['id']}/")
    assert (detail["tasks"], detail["quarantined"]) == (3, 1)


def test_datasets_need_a_submit_key(case: ApiCase) -> None:
    case.check_list_access("/api/v1/datasets/")
    case.check_write_access("post", "/api/v1/datasets/", {"name": "easy", "environment": "sums"}, own=False)
    task = {"key": "two", "payload": {"a": 1, "b": 1}}
    case.check_write_access("post", f"/api/v1/datasets/{case.domain.dataset.id}/tasks/", {"tasks": [task]})


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        ({"name": "easy", "environment": "no-such"}, 422, "invalid", "/environment"),
        ({"name": "sums", "environment": "sums"}, 409, "conflict", "/name"),
        ({"name": "easy"}, 422, "invalid", "/environment"),
        ({"name": ["easy"], "environment": "sums"}, 422, "invalid", "/name"),
    ],
)
def test_a_wrong_dataset_is_refused(case: ApiCase, body: Any, status: int, code: str, pointer: str) -> None:
    before = case.row_counts()
    expect_problem(case.submitter.post("/api/v1/datasets/", body), status, code, pointer)
    assert case.row_counts() == before


GOOD = {"key": "two", "payload": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("task", "status", "code", "pointer"),
    [
        ({"key": "three", "payload": {"a": "one", "b": 2}}, 422, "invalid", "/tasks/1/payload/a"),
        ({"key": "three", "payload": {"a": 1}}, 422, "invalid", "/tasks/1/payload/b"),
        ({"key": "three", "payload": {"a": 1, "b": 2, "c": 3}}, 422, "invalid", "/tasks/1/payload/c"),
        ({"key": "three", "payload": []}, 422, "invalid", "/tasks/1/payload"),
        ({"key": "three"}, 422, "invalid", "/tasks/1/payload"),
        ({"key": 3, "payload": {"a": 1, "b": 2}}, 422, "invalid", "/tasks/1/key"),
        ({"key": "", "payload": {"a": 1, "b": 2}}, 422, "invalid", "/tasks/1/key"),
        (GOOD, 422, "invalid", "/tasks/1/key"),
        ({"key": "one", "payload": {"a": 1, "b": 2}}, 409, "conflict", "/tasks/1/key"),
    ],
)
def test_one_wrong_task_refuses_all(case: ApiCase, task: Any, status: int, code: str, pointer: str) -> None:
    before = case.row_counts()
    path = f"/api/v1/datasets/{case.domain.dataset.id}/tasks/"
    expect_problem(case.submitter.post(path, {"tasks": [GOOD, task]}), status, code, pointer)
    assert case.row_counts() == before


def test_policies_are_listed(case: ApiCase) -> None:
    case.check_list_access("/api/v1/policies/")
    [policy] = case.reader.get("/api/v1/policies/").json()["results"]
    assert (policy["name"], policy["version"]) == ("tiny", 0)


def test_pages_follow_each_other_without_gaps_or_repeats(case: ApiCase) -> None:
    Task.objects.bulk_create(Task(dataset=case.domain.dataset, key=f"k{i}", payload={}) for i in range(24))
    path: str | None = f"/api/v1/datasets/{case.domain.dataset.id}/tasks/?limit=10&quarantined=false"
    sizes, ids = [], []
    while path is not None:
        page = case.reader.get(path).json()
        sizes.append(len(page["results"]))
        ids += [task["id"] for task in page["results"]]
        path = page["next"]
    assert sizes == [10, 10, 5]
    assert ids == sorted(set(ids))


def test_lists_take_the_same_queries_whatever_their_length(
    case: ApiCase, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    project, environment = case.domain.project, case.domain.environment
    tasks = f"/api/v1/datasets/{case.domain.dataset.id}/tasks/"
    case.reader.get("/api/v1/policies/")  # notes the key's use, which is not repeated within a minute
    for size in (1, 20):
        Policy.objects.bulk_create(Policy(project=project, name=f"p{size}-{i}") for i in range(size))
        Environment.objects.bulk_create(
            Environment(project=project, name=f"e{size}-{i}", handler="arithmetic") for i in range(size)
        )
        Dataset.objects.bulk_create(Dataset(project=project, environment=environment, name=f"d{size}-{i}") for i in range(size))
        Task.objects.bulk_create(Task(dataset=case.domain.dataset, key=f"t{size}-{i}") for i in range(size))
        for path, queries in (("policies/", 2), ("environments/", 2), ("datasets/", 2)):
            with django_assert_num_queries(queries):
                assert len(case.reader.get(f"/api/v1/{path}").json()["results"]) > size
        with django_assert_num_queries(3):  # key, dataset, tasks
            assert len(case.reader.get(tasks).json()["results"]) > size
