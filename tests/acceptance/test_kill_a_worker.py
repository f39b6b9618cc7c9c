"""kill -9 of any one worker in the middle of a run: every rollout still finishes, exactly once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.acceptance.platform import Platform, running_platform, submit

SUMS = [{"n": 5, "environment": "sums", "payload": {"a": a, "b": 1}} for a in range(5)]
PROBLEMS = [
    {
        "n": 5,
        "environment": "math",
        "payload": {"id": f"m{i}", "question": f"What is 12 * {i}?", "expected_answer": str(12 * i)},
    }
    for i in range(5)
]
HELD = """SELECT count(*)::int FROM rollouts_rollout r JOIN rollouts_workerprocess w ON w.id = r.lease_owner_id
          WHERE w.stage = %s AND w.lost_at IS NULL"""
UNSTOPPED = "SELECT count(*) FROM sandboxes_sandbox WHERE stopped_at IS NULL"


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_all_fifty_finish_exactly_once(stage: str, tmp_path: Path, rabbitmq_url: str, slow_model: str):
    with running_platform(tmp_path / "var", rabbitmq_url) as platform:
        platform.start_execution()
        submit(platform, slow_model, SUMS + PROBLEMS)
        platform.wait_for(lambda: stopped_with_work_in_hand(platform, stage), f"rollouts in the hands of the {stage} worker")
        platform.kill(stage)
        platform.start_worker(stage)
        platform.wait_until_all_finished()
        assert_each_finished_once(platform, 50)
        lost = "SELECT count(*) FROM rollouts_rolloutevent WHERE data->>'cause' = 'worker_lost'"
        assert platform.value(lost) >= 1
        platform.wait_for(lambda: platform.value(UNSTOPPED) == 0, "the sandboxes to be stopped")


def stopped_with_work_in_hand(platform: Platform, stage: str) -> bool:
    """Freeze the worker; whether it holds something, else it goes on. Frozen, it cannot finish what we are about to see."""
    if platform.value(HELD, stage) == 0:
        return False
    worker = platform.processes[stage]
    worker.send_signal(signal.SIGSTOP)
    if platform.value(HELD, stage) > 0:
        return True
    worker.send_signal(signal.SIGCONT)
    return False


def assert_each_finished_once(platform: Platform, count: int) -> None:
    terminal = ("succeeded", "failed", "timed_out", "cancelled", "discarded")
    assert platform.rows("SELECT state, count(*)::int AS n FROM rollouts_rollout GROUP BY state") == [
        {"state": "succeeded", "n": count}
    ]
    ends = "SELECT count(*)::int FROM rollouts_rolloutevent WHERE to_state = ANY(%s) GROUP BY rollout_id"
    assert [row["count"] for row in platform.rows(ends, list(terminal))] == [1] * count
    assert platform.value("SELECT count(*)::int FROM (SELECT DISTINCT rollout_id, version FROM rollouts_reward) r") == count
    # The trajectory of the attempt that counts is whole: as many stored calls as turns.
    torn = """SELECT count(*) FROM rollouts_rollout r WHERE turns <>
              (SELECT count(*) FROM rollouts_modelcall c WHERE c.rollout_id = r.id AND c.attempt = r.attempt)"""
    assert platform.value(torn) == 0
