"""Delivery by long poll: every finished rollout exactly once, whatever commits late, and no connection held while waiting."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgpack
import pytest
from django.db import connection, transaction

from rollouts.client import Client, unpack
from rollouts.lifecycle import State
from rollouts.models import ModelCall, Reward, Rollout, Run
from rollouts.services.cancel import cancel_rollouts
from tests.integration.api_case import ApiCase, expect_problem

# Delivery looks at all transactions of the database cluster, so rows of an open test transaction would never be delivered.
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def case(transactional_db: None) -> ApiCase:
    return ApiCase()


def finish(rollout: Rollout) -> None:
    cancel_rollouts(project=rollout.project, rollout_id=rollout.id)


def get(case: ApiCase, after: str = "", **query: Any) -> dict[str, Any]:
    answer = case.reader.get(f"/api/v1/runs/{case.domain.run.id}/results/", {"after": after, **query})
    assert answer.status_code == 200, answer.content
    return answer.json()  # type: ignore[no-any-return]


def get_settled(case: ApiCase, expected: int, after: str = "", **query: Any) -> dict[str, Any]:
    """As `get`, once other tests' transactions on the same server no longer hold back this many results."""
    deadline = time.monotonic() + 30
    while len((answer := get(case, after, **query))["results"]) < expected:
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)
    return answer


@contextmanager
def finishing(rollout: Rollout) -> Iterator[None]:
    """In another transaction, which has finished `rollout` and commits at the end of the block."""
    done, commit = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with transaction.atomic():
                finish(rollout)
                done.set()
                assert commit.wait(30)
        finally:
            connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert done.wait(30)
        yield
    finally:
        commit.set()
        thread.join()


def test_results_come_in_order_and_once(case: ApiCase) -> None:
    rollouts = case.domain.submit(n=5)
    for rollout in (rollouts[3], rollouts[0], rollouts[4]):
        finish(rollout)
    first = get_settled(case, 2, limit=2)
    assert [row["id"] for row in first["results"]] == [str(rollouts[3].id), str(rollouts[0].id)]
    assert first["done"] is False
    second = get_settled(case, 1, first["next"], limit=2)
    assert [row["id"] for row in second["results"]] == [str(rollouts[4].id)]
    assert second["done"] is False
    nothing = get(case, second["next"])
    assert (nothing["results"], nothing["next"], nothing["done"]) == ([], second["next"], False)
    for rollout in (rollouts[2], rollouts[1]):
        finish(rollout)
    last = get_settled(case, 2, second["next"])
    assert [row["id"] for row in last["results"]] == [str(rollouts[2].id), str(rollouts[1].id)]
    assert last["done"] is True
    assert get(case, last["next"]) == {"results": [], "next": last["next"], "done": True}


def test_each_result_carries_its_own_cursor(case: ApiCase) -> None:
    for rollout in case.domain.submit(n=3):
        finish(rollout)
    everything = get_settled(case, 3)["results"]
    assert get(case, everything[0]["cursor"])["results"] == everything[1:]


def test_many_finished_by_one_transaction_come_in_pages(case: ApiCase) -> None:
    ids = {str(rollout.id) for rollout in case.domain.submit(n=7)}
    cancel_rollouts(project=case.domain.project, run_id=case.domain.run.id)
    get_settled(case, 7)
    after, seen, sizes = "", [], []
    while True:
        page = get(case, after, limit=3)
        seen += [row["id"] for row in page["results"]]
        sizes.append(len(page["results"]))
        after = page["next"]
        if page["done"]:
            break
    assert sizes == [3, 3, 1]
    assert seen == sorted(ids)


def test_a_late_commit_is_never_skipped(case: ApiCase) -> None:
    early, late = case.domain.submit(n=2)
    with finishing(late):  # begins first, commits last
        finish(early)
        held_back = get(case)
        assert (held_back["results"], held_back["done"]) == ([], False)
    answer = get_settled(case, 2, held_back["next"])
    assert [row["id"] for row in answer["results"]] == [str(late.id), str(early.id)]
    assert answer["done"] is True


@pytest.fixture
def http(case: ApiCase, server_url: str) -> Iterator[httpx.Client]:
    """Waiting answers come bit by bit, which takes a real server."""
    headers = {"Authorization": f"Bearer {case.owner_secret}"}
    with httpx.Client(base_url=server_url, headers=headers, timeout=60) as client:
        yield client


def test_waiting_ends_with_the_first_result(case: ApiCase, http: httpx.Client) -> None:
    rollout, _ = case.domain.submit(n=2)
    with http.stream("GET", f"/api/v1/runs/{rollout.run_id}/results/", params={"wait": 60}) as answer:
        finish(rollout)  # the head of the answer is here, so the server waits
        answer.read()
    assert [row["id"] for row in answer.json()["results"]] == [str(rollout.id)]


def test_waiting_ends_at_its_time(case: ApiCase, http: httpx.Client) -> None:
    run_id = case.domain.submit()[0].run_id
    started = time.monotonic()
    answer = http.get(f"/api/v1/runs/{run_id}/results/", params={"wait": 0.6}).json()
    assert (answer["results"], answer["done"]) == ([], False)
    assert time.monotonic() - started >= 0.6


def test_two_hundred_trainers_wait_without_connections_or_queries_of_their_own(case: ApiCase, server_url: str) -> None:
    runs = [case.domain.run, *(case.domain.new_run() for _ in range(9))]
    for run in runs:
        case.domain.submit(run=run)

    def in_database(function: Callable[[], Any]) -> Any:
        try:
            return function()
        finally:
            connection.close()

    def connections() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
            return int(cursor.fetchone()[0])

    def finish_all() -> None:
        for run in runs:
            cancel_rollouts(project=case.domain.project, run_id=run.id)

    async def wait_for_result(client: httpx.AsyncClient, run: Run, waiting: asyncio.Semaphore) -> list[str]:
        async with client.stream("GET", f"/api/v1/runs/{run.id}/results/", params={"wait": 60}) as answer:
            waiting.release()
            await answer.aread()
        return [row["id"] for row in answer.json()["results"]]

    async def scenario() -> None:
        waiting = asyncio.Semaphore(0)
        headers = {"Authorization": f"Bearer {case.owner_secret}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server_url, headers=headers, timeout=60, limits=limits) as client:
            trainers = [asyncio.create_task(wait_for_result(client, runs[i % 10], waiting)) for i in range(200)]
            for _ in trainers:
                await waiting.acquire()
            assert await asyncio.to_thread(in_database, connections) < 30
            assert (await client.get(f"/api/v1/runs/{runs[0].id}/")).status_code == 200
            await asyncio.to_thread(in_database, finish_all)
            assert all([len(results) == 1 for results in await asyncio.gather(*trainers)])

    asyncio.run(scenario())


def test_a_chain_of_cursors_survives_broken_connections(case: ApiCase, http: httpx.Client) -> None:
    """Rollouts finish in many threads while a trainer's connection breaks at random places: it gets each of them once."""
    rollouts = case.domain.submit(n=60)
    chance = random.Random(7)  # noqa: S311

    def finish_some(mine: list[Rollout]) -> None:
        try:
            for rollout in mine:
                finish(rollout)
        finally:
            connection.close()

    threads = [threading.Thread(target=finish_some, args=[rollouts[i::6]]) for i in range(6)]
    for thread in threads:
        thread.start()
    seen: list[str] = []
    after, done = "", False
    while not done:
        query = {"after": after, "wait": 30, "limit": chance.randint(1, 7)}
        with http.stream("GET", f"/api/v1/runs/{case.domain.run.id}/results/", params=query) as answer:
            if chance.random() < 0.4:
                continue  # hang up, whether or not the answer has come
            answer.read()
        page = answer.json()
        if page["results"] and chance.random() < 0.3:  # crash in the middle of an answer, having kept the cursor of a result
            kept = page["results"][: chance.randint(1, len(page["results"]))]
            seen += [row["id"] for row in kept]
            after = kept[-1]["cursor"]
            continue
        seen += [row["id"] for row in page["results"]]
        after, done = page["next"], page["done"]
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(str(rollout.id) for rollout in rollouts)


def test_messagepack_says_the_same_as_json(case: ApiCase, http: httpx.Client) -> None:
    rollout = case.domain.rollout_in(State.SUCCEEDED)
    call = {"finish_reason": "stop", "policy": "tiny", "policy_version": 1, "latency": 0.1}
    for turn in (0, 1):
        tokens = {"context_ids": [turn, 9], "sampled_ids": [7], "logprobs": [-0.25], "prompt_tokens": 2 + 3 * turn}
        ModelCall.objects.create(rollout=rollout, attempt=1, turn=turn, **tokens, **call)
    get_settled(case, 1)
    path = f"/api/v1/runs/{case.domain.run.id}/results/"
    for query in ({}, {"include": "trajectory"}, {"wait": 0.2}):
        packed = http.get(path, params=query, headers={"Accept": "application/msgpack"})
        assert packed.headers["Content-Type"] == "application/msgpack"
        assert msgpack.unpackb(packed.content) == http.get(path, params=query).json()
    [row] = msgpack.unpackb(http.get(path, params={"include": "segments"}, headers={"Accept": "application/msgpack"}).content)[
        "results"
    ]
    [text_row] = http.get(path, params={"include": "segments"}).json()["results"]
    assert unpack(row["segments"][0]) == unpack(text_row["segments"][0])
    assert list(unpack(row["segments"][0]).token_ids) == [0, 9, 7, 1, 9, 7]
    with Client(str(http.base_url), case.owner_secret) as client:
        compressed, plain = (
            list(client.iter_results(case.domain.run.id, include="segments", compress=on)) for on in (True, False)
        )
    assert compressed == plain == [row]


def test_problems_are_json_for_those_who_asked_for_messagepack(case: ApiCase) -> None:
    path = f"/api/v1/runs/{case.domain.run.id}/results/"
    answer = case.reader.get(path, {"wait": -1}, headers={"Accept": "application/msgpack"})
    expect_problem(answer, 400, "invalid_parameter", "?wait")
    expect_problem(case.stranger.get(path, headers={"Accept": "application/msgpack+zstd"}), 404, "not_found")
    expect_problem(case.reader.get(path, headers={"Accept": "text/csv"}), 406, "not_acceptable")


def test_nothing_to_wait_for_is_answered_at_once(case: ApiCase) -> None:
    started = time.monotonic()
    assert get(case, wait=60) == {"results": [], "next": get(case)["next"], "done": True}
    assert time.monotonic() - started < 5


def test_results_carry_rewards_and_trajectories_on_request(case: ApiCase) -> None:
    rollout = case.domain.rollout_in(State.SUCCEEDED)
    for version, value in ((1, 0.0), (2, 1.0)):
        Reward.objects.create(rollout=rollout, version=version, name="correct", value=value)
    ModelCall.objects.create(
        rollout=rollout,
        attempt=rollout.attempt,
        turn=1,
        context_ids=[1, 2],
        sampled_ids=[3],
        logprobs=[-0.5],
        finish_reason="stop",
        prompt_tokens=2,
        policy="tiny",
        policy_version=1,
        latency=0.1,
    )
    [plain] = get_settled(case, 1)["results"]
    assert plain["rewards"] == {"correct": 1.0}
    assert "trajectory" not in plain
    [full] = get(case, include="trajectory")["results"]
    segment = {
        **{"token_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [0.0, 0.0, -0.5], "policy_versions": [-1, -1, 1]},
        **{"opened_by": "", "parent_segment": None, "pictures": []},
    }
    assert full["trajectory"]["segments"] == [segment]
    assert {**plain, "trajectory": full["trajectory"]} == full


def test_packed_segments_say_the_same_as_trajectories(case: ApiCase) -> None:
    exact, without_logprobs, text_only = (case.domain.rollout_in(State.SUCCEEDED) for _ in range(3))
    call = {"finish_reason": "stop", "policy": "tiny", "policy_version": 1, "latency": 0.1}
    for rollout, logprobs in ((exact, [-0.5]), (without_logprobs, None)):
        for turn, segment in ((1, 0), (2, 0), (3, 1)):
            ModelCall.objects.create(
                rollout=rollout,
                attempt=rollout.attempt,
                turn=turn,
                segment=segment,
                context_ids=[turn, 150_000],
                sampled_ids=[7] * turn,
                logprobs=[-0.25] if turn == 1 else logprobs and logprobs * turn,
                prompt_tokens=5 if turn == 2 else 2,
                version_spans=[[1, 1], [2, 1]] if turn == 2 else [],
                policy_version_last=2 if turn == 2 else None,
                **call,
            )
    ModelCall.objects.create(
        rollout=text_only, attempt=1, turn=1, context_ids=[], sampled_ids=[], logprobs=None, text="hi", prompt_tokens=2, **call
    )
    numbers = get_settled(case, 3, include="trajectory")["results"]
    packed = get(case, include="segments")["results"]
    assert [len(row["segments"]) for row in packed] == [2, 2, 0]
    for row, expected in zip(packed, numbers, strict=True):
        for segment, plain in zip(row["segments"], expected["trajectory"]["segments"], strict=True):
            arrays = unpack(segment)
            assert list(arrays.token_ids) == plain["token_ids"]
            assert list(arrays.loss_mask) == plain["loss_mask"]
            assert list(arrays.policy_versions) == plain["policy_versions"]
            assert (None if arrays.logprobs is None else list(arrays.logprobs)) == plain["logprobs"]

    first = numbers[0]["trajectory"]["segments"][0]
    assert first["policy_versions"] == [-1, -1, 1, -1, -1, 1, 2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt_tokens": 6}, "turn 1 sent 6 ids, but 5 are stored"),
        ({"segment": 2}, "turn 1 is of segment 2, but there are 1 segments"),
    ],
)
def test_tokens_that_cannot_be_what_was_sampled_are_withheld(case: ApiCase, change: dict[str, int], problem: str) -> None:
    broken, whole = (case.domain.rollout_in(State.SUCCEEDED) for _ in range(2))
    call = {"finish_reason": "stop", "policy": "tiny", "policy_version": 1, "latency": 0.1}
    tokens = {"context_ids": [1, 2], "sampled_ids": [3], "logprobs": [-0.5]}
    for rollout in (broken, whole):
        for turn in (0, 1):
            ModelCall.objects.create(rollout=rollout, attempt=1, turn=turn, prompt_tokens=2 + 3 * turn, **tokens, **call)
    ModelCall.objects.filter(rollout=broken, turn=1).update(**change)
    get_settled(case, 2)
    packed = {row["id"]: row for row in get(case, include="segments")["results"]}
    plain = {row["id"]: row["trajectory"] for row in get(case, include="trajectory")["results"]}
    for rows in (packed, plain):
        assert (rows[str(broken.id)]["segments"], rows[str(broken.id)]["token_problem"]) == ([], problem)
        assert (len(rows[str(whole.id)]["segments"]), rows[str(whole.id)]["token_problem"]) == (1, "")


def test_only_the_own_project_gets_results(case: ApiCase) -> None:
    case.check_read_access(f"/api/v1/runs/{case.domain.run.id}/results/")


@pytest.mark.parametrize(
    ("query", "parameter"),
    [({"wait": 61}, "?wait"), ({"wait": -1}, "?wait"), ({"wait": "nan"}, "?wait"), ({"include": "tokens"}, "?include")],
)
def test_wrong_parameters_are_named(case: ApiCase, query: dict[str, Any], parameter: str) -> None:
    answer = case.reader.get(f"/api/v1/runs/{case.domain.run.id}/results/", query)
    expect_problem(answer, 400, "invalid_parameter", parameter)


def test_a_cursor_from_another_run_is_harmless(case: ApiCase) -> None:
    case.domain.submit()
    cancel_rollouts(project=case.domain.project, run_id=case.domain.run.id)
    cursor = get_settled(case, 1)["next"]
    answer = case.stranger.get(f"/api/v1/runs/{case.other.run.id}/results/", {"after": cursor})
    assert answer.json()["results"] == []


def test_the_number_of_queries_does_not_grow(case: ApiCase, django_assert_num_queries: Any) -> None:
    case.domain.submit(n=20)
    cancel_rollouts(project=case.domain.project, run_id=case.domain.run.id)
    get_settled(case, 20)
    for limit in (1, 20):
        with django_assert_num_queries(6):  # key, run, rollouts, 2 for `done`, rewards (that of the segments is not Django's)
            get(case, limit=limit, include="segments")
        with django_assert_num_queries(11):  # key, run, rollouts, 2 for `done`, rewards, 5 for trajectories
            assert len(get(case, limit=limit, include="trajectory")["results"]) == limit
