"""Rollouts, their trajectories, histories and rewards over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from rollouts.lifecycle import State
from rollouts.models import Message, ModelCall, Reward, Rollout, ToolCall
from tests.integration.api_case import ApiCase, expect_problem

ROLLOUTS = "/api/v1/rollouts/"


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


def add_call(rollout: Rollout, turn: int, **values: Any) -> None:
    ModelCall.objects.create(
        rollout=rollout,
        attempt=values.pop("attempt", rollout.attempt),
        turn=turn,
        **{
            "segment": 0,
            "context_ids": [1, 2, 3],
            "sampled_ids": [7, 8],
            "logprobs": [-0.5, -0.25],
            "text": f"reply {turn}",
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "policy": "tiny",
            "policy_version": 4,
            "latency": 0.5,
            **values,
        },
    )


def with_trajectory(case: ApiCase) -> Rollout:
    """Two turns in one segment, then a third in another; and what a lost attempt left behind."""
    rollout = case.domain.rollout_in(State.SUCCEEDED)
    add_call(rollout, 1, attempt=rollout.attempt - 1, text="lost")
    add_call(rollout, 1)
    add_call(rollout, 2, context_ids=[4], sampled_ids=[9], logprobs=[-1.0], prompt_tokens=6)
    add_call(rollout, 3, segment=1, context_ids=[5, 6], sampled_ids=[7], logprobs=None, prompt_tokens=2)
    Message.objects.create(rollout=rollout, attempt=rollout.attempt - 1, index=0, turn=1, role="user", content="lost")
    for index, (role, content) in enumerate([("user", "1 + 2?"), ("assistant", "reply 1")]):
        Message.objects.create(rollout=rollout, attempt=rollout.attempt, index=index, turn=1, role=role, content=content)
    ToolCall.objects.create(
        rollout=rollout,
        attempt=rollout.attempt,
        turn=1,
        index=0,
        name="bash",
        arguments={"command": "true"},
        exit_code=0,
        started_at=timezone.now(),
        duration=0.1,
    )
    Rollout.objects.filter(id=rollout.id).update(fidelity="segmented")
    return rollout


def test_a_rollout_shows_its_state_and_why_it_ended(case: ApiCase) -> None:
    queued, running = case.domain.submit()[0], case.domain.rollout_in(State.RUNNING)
    assert case.check_read_access(f"{ROLLOUTS}{queued.id}/")["termination"] is None
    shown = case.reader.get(f"{ROLLOUTS}{running.id}/").json()
    assert (shown["state"], shown["attempt"], shown["environment"], shown["task_key"]) == ("running", 1, "sums", "one")
    assert [attempt["number"] for attempt in shown["attempts"]] == [1]

    case.check_write_access("post", f"{ROLLOUTS}{queued.id}/cancel/")
    assert case.submitter.post(f"{ROLLOUTS}{queued.id}/cancel/").json() == {"cancelled": 1}
    ended = case.reader.get(f"{ROLLOUTS}{queued.id}/").json()
    assert ended["state"] == "cancelled"
    assert ended["termination"] == {"phase": "queue", "cause": "cancelled", "blame": "caller", "detail": ""}
    assert ended["reward"] is None


def test_lists_show_only_the_own_project(case: ApiCase) -> None:
    case.other.submit(n=2)
    [own] = case.domain.submit()
    case.check_list_access(ROLLOUTS)
    assert [row["id"] for row in case.reader.get(ROLLOUTS).json()["results"]] == [str(own.id)]
    assert case.reader.get(f"{ROLLOUTS}?run={case.other.run.id}").json() == {"results": [], "next": None}


def test_each_filter_selects(case: ApiCase) -> None:
    good, bad, queued = (case.domain.submit()[0] for _ in range(3))
    ended = {"state": "succeeded", "finished_at": timezone.now(), "finished_xid": 1}
    cause = {"termination_cause": "completed", "termination_blame": "policy", "trainable": True}
    for rollout, values in ((good, {"reward": 1.0, **cause}), (bad, {"reward": -1.0, **cause, "trainable": False})):
        for step in ("initializing", "ready", "running", "evaluating"):
            held = step in ("initializing", "running")
            Rollout.objects.filter(id=rollout.id).update(
                state=step, attempt=1, lease_owner=case.domain.worker() if held else None
            )
        Rollout.objects.filter(id=rollout.id).update(**ended, **values)

    def listed(query: str) -> set[str]:
        return {row["id"] for row in case.reader.get(f"{ROLLOUTS}?{query}").json()["results"]}

    assert listed("state=succeeded") == {str(good.id), str(bad.id)}
    assert listed("state=queued") == {str(queued.id)}
    assert listed("reward_min=0") == listed("trainable=true") == {str(good.id)}
    assert listed("reward_max=0") == {str(bad.id)}
    assert listed("reward_min=-1&reward_max=1") == {str(good.id), str(bad.id)}
    assert listed("cause=completed&blame=policy") == {str(good.id), str(bad.id)}
    assert listed("cause=refusal") == set()
    assert listed(f"group={queued.group_id}") == {str(queued.id)}
    assert listed(f"run={case.domain.run.id}&environment=sums") == {str(good.id), str(bad.id), str(queued.id)}
    assert listed("environment=other") == set()


def test_the_filters_survive_into_the_next_page(case: ApiCase) -> None:
    mine = {str(rollout.id) for rollout in case.domain.submit(n=5)}
    case.domain.submit(n=5, run=case.domain.new_run())
    first = case.reader.get(f"{ROLLOUTS}?run={case.domain.run.id}&limit=3").json()
    second = case.reader.get(first["next"]).json()
    ids = [row["id"] for row in first["results"] + second["results"]]
    assert ids == sorted(mine, reverse=True)
    assert second["next"] is None


def test_a_trajectory_is_the_newest_attempts(case: ApiCase) -> None:
    rollout = with_trajectory(case)
    shown = case.check_read_access(f"{ROLLOUTS}{rollout.id}/trajectory/")
    assert (shown["attempt"], shown["fidelity"]) == (rollout.attempt, "segmented")
    assert [message["content"] for message in shown["messages"]] == ["1 + 2?", "reply 1"]
    assert [call["text"] for call in shown["model_calls"]] == ["reply 1", "reply 2", "reply 3"]
    assert [call["sampled_ids"] for call in shown["model_calls"]] == [[7, 8], [9], [7]]
    first = shown["model_calls"][0]
    assert (first["logprobs"], first["policy"], first["policy_version"]) == ([-0.5, -0.25], "tiny", 4)
    assert (first["latency"], first["finish_reason"]) == (0.5, "stop")
    assert "prompt_ids" not in first
    assert [(call["name"], call["arguments"], call["exit_code"]) for call in shown["tool_calls"]] == [
        ("bash", {"command": "true"}, 0)
    ]


def test_segments_are_ready_to_train_on(case: ApiCase) -> None:
    shown = case.reader.get(f"{ROLLOUTS}{with_trajectory(case).id}/trajectory/").json()
    unopened = {"opened_by": "", "parent_segment": None, "pictures": []}
    assert shown["segments"] == [
        {
            "token_ids": [1, 2, 3, 7, 8, 4, 9],
            "loss_mask": [0, 0, 0, 1, 1, 0, 1],
            "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, -1.0],
            "policy_versions": [-1, -1, -1, 4, 4, -1, 4],
            **unopened,
        },
        {"token_ids": [5, 6, 7], "loss_mask": [0, 0, 1], "logprobs": None, "policy_versions": [-1, -1, 4], **unopened},
    ]


def test_full_prompts_are_there_when_asked_for(case: ApiCase) -> None:
    shown = case.reader.get(f"{ROLLOUTS}{with_trajectory(case).id}/trajectory/?tokens=full").json()
    assert [call["prompt_ids"] for call in shown["model_calls"]] == [[1, 2, 3], [1, 2, 3, 7, 8, 4], [5, 6]]
    expect_problem(
        case.reader.get(f"{ROLLOUTS}{case.domain.submit()[0].id}/trajectory/?tokens=all"), 400, "invalid_parameter", "?tokens"
    )


def test_text_only_trajectories_have_no_segments(case: ApiCase) -> None:
    rollout = case.domain.rollout_in(State.SUCCEEDED)
    add_call(rollout, 1, context_ids=[], sampled_ids=[], logprobs=None)
    shown = case.reader.get(f"{ROLLOUTS}{rollout.id}/trajectory/").json()
    assert shown["segments"] == []
    assert shown["model_calls"][0]["text"] == "reply 1"


def test_a_rollout_that_has_not_run_has_an_empty_trajectory(case: ApiCase) -> None:
    shown = case.reader.get(f"{ROLLOUTS}{case.domain.submit()[0].id}/trajectory/").json()
    assert (shown["messages"], shown["model_calls"], shown["segments"], shown["fidelity"]) == ([], [], [], "")


def test_the_history_is_in_order(case: ApiCase) -> None:
    rollout = case.domain.rollout_in(State.READY)
    events = case.check_read_access(f"{ROLLOUTS}{rollout.id}/events/")["results"]
    assert [event["to_state"] for event in events] == ["queued", "initializing", "ready"]
    assert events[0]["kind"] == "submitted"
    first = case.reader.get(f"{ROLLOUTS}{rollout.id}/events/?limit=2").json()
    assert case.reader.get(first["next"]).json()["results"] == events[2:]


def test_rewards_keep_their_old_versions(case: ApiCase) -> None:
    rollout = case.domain.rollout_in(State.SUCCEEDED)
    for version, value in ((1, 0.0), (2, None)):
        Reward.objects.create(rollout=rollout, version=version, name="correct", value=value, detail={"v": version})
    shown = case.check_read_access(f"{ROLLOUTS}{rollout.id}/rewards/")
    assert shown["reward"] is None
    assert [(row["version"], row["name"], row["value"]) for row in shown["components"]] == [
        (1, "correct", 0.0),
        (2, "correct", None),
    ]


def test_reading_takes_the_same_queries_whatever_the_length(
    case: ApiCase, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    rollout = with_trajectory(case)
    case.reader.get(ROLLOUTS)  # notes the key's use, which is not repeated within a minute
    for size in (1, 30):
        case.domain.submit(n=size)
        with django_assert_num_queries(2):  # key, rollouts
            assert len(case.reader.get(ROLLOUTS).json()["results"]) > size
    with django_assert_num_queries(7):  # key, rollout, messages, model calls, tool calls, pictures of both
        case.reader.get(f"{ROLLOUTS}{rollout.id}/trajectory/?tokens=full")
    with django_assert_num_queries(3):  # key, rollout, events
        case.reader.get(f"{ROLLOUTS}{rollout.id}/events/")
