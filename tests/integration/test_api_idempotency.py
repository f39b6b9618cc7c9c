"""A creating request sent twice under one Idempotency-Key creates once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection, transaction
from rest_framework.response import Response

from rollouts.api.idempotency import hold
from rollouts.models import IdempotentResponse, Rollout, Run
from tests.integration.api_case import ApiCase, client_for, expect_problem

RUNS = "/api/v1/runs/"
NEW_RUN = {"name": "grpo", "policy": "tiny"}


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


def post(case: ApiCase, body: Any, key: str, path: str = RUNS, client: Any = None) -> Response:
    return (client or case.submitter).post(path, body, HTTP_IDEMPOTENCY_KEY=key)


def test_the_second_request_gets_the_first_answer(case: ApiCase) -> None:
    first = post(case, NEW_RUN, "k1")
    second = post(case, {"policy": "tiny", "name": "grpo"}, "k1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert second.headers["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first.headers
    assert Run.objects.filter(name="grpo").count() == 1


def test_groups_are_queued_once(case: ApiCase) -> None:
    path = f"{RUNS}{case.domain.run.id}/groups/"
    body = {"groups": [{"n": 3, "dataset": "sums", "key": "one"}]}
    assert post(case, body, "k", path).json() == post(case, body, "k", path).json()
    assert Rollout.objects.count() == 3


def test_another_body_or_path_under_the_same_key_is_refused(case: ApiCase) -> None:
    post(case, NEW_RUN, "k1")
    expect_problem(post(case, NEW_RUN | {"name": "ppo"}, "k1"), 422, "idempotency_key_reused")
    expect_problem(post(case, NEW_RUN, "k1", "/api/v1/datasets/"), 422, "idempotency_key_reused")
    assert Run.objects.filter(name__in=["grpo", "ppo"]).count() == 1


def test_projects_do_not_share_keys(case: ApiCase) -> None:
    first, second = post(case, NEW_RUN, "k1"), post(case, NEW_RUN, "k1", client=case.stranger)
    assert second.status_code == 201
    assert first.json()["id"] != second.json()["id"]


def test_a_refused_request_leaves_its_key_free(case: ApiCase) -> None:
    expect_problem(post(case, NEW_RUN | {"policy": "no-such"}, "k1"), 422, "invalid", "/policy")
    assert not IdempotentResponse.objects.exists()
    assert post(case, NEW_RUN, "k1").status_code == 201


@pytest.mark.parametrize("key", ["", "x" * 201, "two words", "ä", "line\x00"])
def test_unusable_keys_are_refused(case: ApiCase, key: str) -> None:
    expect_problem(post(case, NEW_RUN, key), 400, "invalid_idempotency_key")


def test_a_read_key_cannot_fetch_stored_answers(case: ApiCase) -> None:
    post(case, NEW_RUN, "k1")
    expect_problem(post(case, NEW_RUN, "k1", client=case.reader), 403, "insufficient_scope")


@pytest.mark.django_db(transaction=True)
def test_a_twin_is_told_that_the_first_is_still_at_work(transactional_db: None) -> None:
    case = ApiCase()
    held, let_go = threading.Event(), threading.Event()

    def first() -> None:
        try:
            with transaction.atomic():
                hold(case.domain.project, "k1")
                held.set()
                assert let_go.wait(30)
        finally:
            connection.close()

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert held.wait(30)
        answer = post(case, NEW_RUN, "k1")
        expect_problem(answer, 409, "idempotency_in_progress")
        assert answer.headers["Retry-After"] == "1"
    finally:
        let_go.set()
        thread.join()
    assert post(case, NEW_RUN, "k1").status_code == 201


@pytest.mark.django_db(transaction=True)
def test_many_at_once_create_once(transactional_db: None) -> None:
    case = ApiCase()
    start = threading.Barrier(8)
    answers: list[Response] = []

    def submit() -> None:
        client = client_for(case.owner_secret)
        try:
            start.wait(30)
            answers.append(post(case, NEW_RUN, "k1", client=client))
        finally:
            connection.close()

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.json()["id"] for answer in answers if answer.status_code == 201}) == 1
    assert Run.objects.filter(name="grpo").count() == 1
