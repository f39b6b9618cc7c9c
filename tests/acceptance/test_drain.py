"""Leaving in good order: a worker that is told that its end is near, and a node that an administrator takes out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.platform import Platform, running_platform, submit

DRAIN_SECONDS = 5


@pytest.fixture
def platform(tmp_path_factory: pytest.TempPathFactory, rabbitmq_url: str) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("drain") / "var", rabbitmq_url, drain_seconds=DRAIN_SECONDS) as running:
        running.start_execution()
        yield running


def problems(*questions: str) -> list[dict[str, Any]]:
    return [
        {"n": 1, "environment": "math", "payload": {"question": question, "expected_answer": "144"}} for question in questions
    ]


def rollouts(platform: Platform) -> list[dict[str, Any]]:
    return platform.rows(
        """SELECT r.*, task.payload ->> 'question' AS question FROM rollouts_rollout r
           JOIN rollouts_task task ON task.id = r.task_id ORDER BY r.id"""
    )


def states(platform: Platform) -> dict[str, tuple[str, int]]:
    """State and attempt of each rollout by its question."""
    return {row["question"]: (row["state"], row["attempt"]) for row in rollouts(platform)}


def test_usr1_lets_finish_what_can_and_hands_back_the_rest(platform: Platform, quick_model: str):
    short, long = "[[delay1:1]]", "[[delay1:60]]"
    submit(platform, quick_model, problems(short, long))
    running = {short: ("running", 1), long: ("running", 1)}
    platform.wait_for(lambda: states(platform) == running, "both to run")
    leaving = platform.processes.pop("run")
    platform.start_worker("run")
    leaving.send_signal(signal.SIGUSR1)
    draining = "SELECT count(*) FROM rollouts_workerprocess WHERE pid = %s AND draining_since IS NOT NULL"
    platform.wait_for(lambda: platform.value(draining, leaving.pid), "the dispatcher to be told")
    later = "What is 12 * 12?"
    submit(platform, quick_model, problems(later))
    assert leaving.wait(60) == 0
    platform.wait_for(lambda: states(platform)[long] == ("running", 2), "the long one to run elsewhere")
    platform.wait_for(lambda: states(platform)[later][0] == "succeeded", "what came meanwhile")
    assert states(platform)[short] == ("succeeded", 1)
    assert states(platform)[later] == ("succeeded", 1)
    assert {row["infra_retries"] for row in rollouts(platform)} == {0}


def test_a_drained_node_holds_nothing_and_starts_nothing_until_it_is_resumed(platform: Platform, quick_model: str):
    submit(platform, quick_model, problems("[[delay1:60]]"))
    platform.wait_for(lambda: states(platform)["[[delay1:60]]"] == ("running", 1), "it to run")
    platform.manage("nodes", "drain", "test-node", "--seconds", "0")
    platform.wait_for(lambda: states(platform)["[[delay1:60]]"] == ("queued", 1), "it to be handed back")
    submit(platform, quick_model, problems("What is 12 * 12?"))
    listed = platform.manage("nodes", "list").splitlines()[1].split()
    assert listed[:5] == ["test-node", "drained", "0/0", "0/0", "0/0"]
    assert {state for state, _ in states(platform).values()} == {"queued"}
    platform.manage("nodes", "resume", "test-node")
    platform.wait_for(lambda: states(platform)["What is 12 * 12?"] == ("succeeded", 1), "the other to succeed")
    platform.wait_for(lambda: states(platform)["[[delay1:60]]"] == ("running", 2), "it to run again")
