"""An EVAL that failed costs no rollout; limits on time end to end. Real processes, sandboxes, a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.platform import Platform, call_bash, platform_with_notes, play, submit

WRITE_DEADLINE = call_bash("echo $PRORL_DEADLINE > note.txt") + "[[reply2:Done.]]"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judge")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, quick_model: str, judge: Path) -> Iterator[Platform]:
    with platform_with_notes(tmp_path_factory.mktemp("rescore"), quick_model, judge=str(judge)) as running:
        yield running


def row(platform: Platform, rollout: Any) -> Any:
    return platform.rows("SELECT * FROM rollouts_rollout WHERE id = %s", rollout["id"])[0]


def wait_for_sandboxes_to_be_stopped(platform: Platform) -> None:
    platform.wait_for(
        lambda: platform.value("SELECT count(*) = 0 FROM sandboxes_sandbox WHERE stopped_at IS NULL"), "sandboxes to stop"
    )


def test_rollouts_whose_eval_failed_are_repaired_from_their_artefacts(platform: Platform, quick_model: str, judge: Path):
    (judge / "here").unlink(missing_ok=True)
    rollouts = play(platform, quick_model, WRITE_DEADLINE, n=3)
    ended = {(r["state"], r["termination_phase"], r["termination_cause"], r["reward"]) for r in rollouts}
    assert ended == {("failed", "eval", "evaluation_error", None)}
    wait_for_sandboxes_to_be_stopped(platform)

    (judge / "here").touch()
    assert platform.manage("rescore", str(rollouts[0]["run_id"])).startswith("3 queued")
    done = "SELECT count(*) FROM rollouts_rollout WHERE run_id = %s AND state = 'succeeded'"
    platform.wait_for(lambda: platform.value(done, rollouts[0]["run_id"]) == 3, "the rollouts to be repaired")
    for before in rollouts:
        after = row(platform, before)
        assert (after["reward"], after["reward_version"], after["trainable"]) == (1.0, 1, True)
        assert (after["termination_phase"], after["termination_cause"], after["attempt"]) == ("run", "completed", 1)
        assert after["finished_xid"] == before["finished_xid"], "it keeps its place in the results"
        assert before["run_seconds"] == after["run_seconds"], "RUN was not repeated"
        deadline = int(after["artefacts"]["note"])
        assert abs(deadline - (before["created_at"].timestamp() + 600)) < 120, "the default agent budget is 600 s"
    wait_for_sandboxes_to_be_stopped(platform)


def test_a_killed_worker_loses_no_rescoring_and_scores_none_twice(platform: Platform, quick_model: str, judge: Path):
    (judge / "here").touch()
    [rollout] = play(platform, quick_model, WRITE_DEADLINE)
    assert (rollout["state"], rollout["reward"]) == ("succeeded", 1.0)
    (judge / "slow").touch()
    platform.manage("rescore", str(rollout["id"]))
    state = "SELECT state FROM rollouts_rescoring WHERE rollout_id = %s"
    platform.wait_for(lambda: platform.value(state, rollout["id"]) == "running", "the rescoring to start")
    platform.kill("eval")
    (judge / "slow").unlink()
    platform.start_worker("eval")
    platform.wait_for(lambda: platform.value(state, rollout["id"]) == "done", "the rescoring to be done")
    assert row(platform, rollout)["reward_version"] == 2
    versions = platform.rows("SELECT version FROM rollouts_reward WHERE rollout_id = %s ORDER BY version", rollout["id"])
    assert [version["version"] for version in versions] == [1, 2]
    wait_for_sandboxes_to_be_stopped(platform)


def test_a_sandbox_lost_before_eval_is_rebuilt_and_run_is_not_repeated(platform: Platform, quick_model: str, judge: Path):
    (judge / "here").touch()
    platform.terminate("eval")
    payload = {"question": WRITE_DEADLINE}
    run_id = submit(platform, quick_model, [{"n": 1, "environment": "notes", "payload": payload}])
    waiting = "SELECT * FROM rollouts_rollout WHERE run_id = %s AND state = 'evaluating'"
    platform.wait_for(lambda: platform.rows(waiting, run_id), "RUN to end")
    [rollout] = platform.rows(waiting, run_id)
    platform.shell(
        f"""
import asyncio
from django.conf import settings
from sandboxes.registry import get_backend
asyncio.run(get_backend(settings.SANDBOX_BACKEND, settings.SANDBOX_DIR).stop({rollout["sandbox_name"]!r}))
print("null")
"""
    )
    platform.start_worker("eval")
    platform.wait_until_all_finished()
    after = row(platform, rollout)
    assert (after["state"], after["reward"], after["attempt"], after["infra_retries"]) == ("succeeded", 1.0, 1, 0)
    wait_for_sandboxes_to_be_stopped(platform)


@pytest.mark.parametrize(
    ("policy", "reward", "trainable"), [("score", 1.0, True), ("mask", 1.0, False), ("zero", 0.0, True), ("drop", None, False)]
)
def test_out_of_time_in_the_middle_of_a_tool_call(
    platform: Platform, quick_model: str, judge: Path, policy: str, reward: float | None, trainable: bool
):
    (judge / "here").touch()
    question = call_bash("echo 7 > note.txt; sleep 600")
    [rollout] = play(platform, quick_model, question, timeouts={"agent": 3}, on_agent_timeout=policy)
    assert (rollout["state"], rollout["termination_cause"]) == ("timed_out", "agent_timeout")
    assert rollout["termination_detail"] == "the agent's 3 s ran out"
    assert (rollout["reward"], rollout["trainable"]) == (reward, trainable)
    assert rollout["artefacts"] == {"note": "7\n"}, "what was there is kept"
    [call] = platform.rows("SELECT * FROM rollouts_toolcall WHERE rollout_id = %s", rollout["id"])
    assert (call["name"], call["error"]) == ("bash", "the rollout ended before the call returned")
    assert platform.value("SELECT count(*) FROM rollouts_modelcall WHERE rollout_id = %s", rollout["id"]) == 1


def test_one_tool_call_has_its_own_limit(platform: Platform, quick_model: str, judge: Path):
    (judge / "here").touch()
    question = call_bash("sleep 600") + call_bash("echo 1 > note.txt", turn="2") + "[[reply3:Done.]]"
    [rollout] = play(platform, quick_model, question, timeouts={"action": 1})
    assert (rollout["state"], rollout["reward"]) == ("succeeded", 1.0)
    [first, second] = platform.rows("SELECT * FROM rollouts_toolcall WHERE rollout_id = %s ORDER BY turn", rollout["id"])
    assert (first["timed_out"], second["timed_out"]) == (True, False)


def test_the_whole_attempt_has_a_limit_that_is_not_the_agents_fault(platform: Platform, quick_model: str):
    [rollout] = play(platform, quick_model, "[[delay:600]]", init=2, timeouts={"agent": 4, "attempt": 4}, max_infra_retries=0)
    assert (rollout["state"], rollout["termination_cause"]) == ("timed_out", "attempt_timeout")
    assert rollout["termination_detail"].endswith("the attempt's 4 s ran out")
    assert (rollout["termination_blame"], rollout["reward"], rollout["trainable"]) == ("infrastructure", None, False)
