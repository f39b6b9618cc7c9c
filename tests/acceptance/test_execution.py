"""Real processes, a real broker, a scripted model: what callers see of running, cancelled, late and interrupted rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.acceptance.platform import Platform, running_platform, submit

SUM = {"environment": "sums", "payload": {"a": 2, "b": 3}}
PROBLEM = {"environment": "math", "payload": {"question": "What is 12 * 12?", "expected_answer": "144"}}


def problem(question: str) -> dict[str, object]:
    return {"environment": "math", "payload": {"question": question, "expected_answer": "144"}}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, rabbitmq_url: str) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("platform") / "var", rabbitmq_url, db_pool_size=2) as running:
        running.start_execution(concurrency=16)
        yield running


def rollouts(platform: Platform, run_id: str) -> list[dict[str, object]]:
    return platform.rows("SELECT * FROM rollouts_rollout WHERE run_id = %s ORDER BY id", run_id)


def wait_for_state(platform: Platform, run_id: str, state: str, count: int = 1) -> None:
    query = "SELECT count(*) FROM rollouts_rollout WHERE run_id = %s AND state = %s"
    platform.wait_for(lambda: platform.value(query, run_id, state) >= count, f"{count} rollouts to be {state}")


def wait_until_finished(platform: Platform, run_id: str) -> None:
    query = "SELECT count(*) = 0 FROM rollouts_rollout WHERE run_id = %s AND finished_at IS NULL"
    platform.wait_for(lambda: platform.value(query, run_id), f"run {run_id} to finish")


def cancel(platform: Platform, run_id: str) -> None:
    platform.shell(
        f"""
from rollouts.models import Run
from rollouts.services.cancel import cancel_rollouts
run = Run.objects.get(id={run_id!r})
print(cancel_rollouts(project=run.project, run_id=run.id))
"""
    )


def test_a_tool_using_rollout_leaves_its_whole_trajectory(platform: Platform, quick_model: str):
    run_id = submit(platform, quick_model, [{"n": 1, **PROBLEM}])
    wait_until_finished(platform, run_id)
    (rollout,) = rollouts(platform, run_id)
    assert (rollout["state"], rollout["fidelity"], rollout["turns"]) == ("succeeded", "token-exact", 2)
    (call,) = platform.rows("SELECT * FROM rollouts_toolcall WHERE rollout_id = %s", rollout["id"])
    assert (call["name"], call["output"].strip(), call["error"]) == ("python", "144", "")
    roles = platform.rows("SELECT role FROM rollouts_message WHERE rollout_id = %s ORDER BY index", rollout["id"])
    assert [row["role"] for row in roles] == ["system", "user", "assistant", "tool", "assistant"]
    calls = platform.rows("SELECT * FROM rollouts_modelcall WHERE rollout_id = %s ORDER BY turn", rollout["id"])
    assert [(c["policy"], c["policy_version"], c["finish_reason"]) for c in calls] == [("tiny", 0, "stop")] * 2
    assert all(len(c["logprobs"]) == len(c["sampled_ids"]) > 0 for c in calls)


def test_the_stored_ids_decode_to_the_stored_text(platform: Platform, quick_model: str):
    run_id = submit(platform, quick_model, [{"n": 2, **PROBLEM}, {"n": 2, **SUM}])
    wait_until_finished(platform, run_id)
    texts = platform.shell(
        f"""
import json
from rollouts.models import ModelCall
print(json.dumps([[call.sampled_ids, call.text] for call in ModelCall.objects.filter(rollout__run_id={run_id!r})]))
"""
    )
    assert len(texts) == 6
    for ids, text in texts:
        answer = httpx.post(f"{quick_model}/detokenize", json={"model": "scripted", "tokens": ids}).json()["prompt"]
        assert answer.removesuffix("<|im_end|>") == text


def test_cancelling_reaches_a_model_call_within_two_seconds(platform: Platform, quick_model: str):
    run_id = submit(platform, quick_model, [{"n": 3, **problem("[[delay:600]]")}])
    wait_for_state(platform, run_id, "running", 3)
    asked = time.monotonic()
    cancel(platform, run_id)
    shell_seconds = time.monotonic() - asked  # most of it is the start of another Python
    wait_for_state(platform, run_id, "cancelled", 3)
    assert time.monotonic() - asked < shell_seconds + 2
    for rollout in rollouts(platform, run_id):
        assert (rollout["termination_phase"], rollout["termination_blame"], rollout["reward"]) == ("run", "caller", None)
    stopped = """SELECT count(*) = 0 FROM sandboxes_sandbox s JOIN rollouts_rollout r ON r.id = s.rollout_id
                 WHERE r.run_id = %s AND s.stopped_at IS NULL"""
    platform.wait_for(lambda: platform.value(stopped, run_id), "the sandboxes to be stopped")


@pytest.mark.parametrize(
    ("policy", "reward", "trainable"), [("score", 0.0, True), ("mask", 0.0, False), ("zero", 0.0, True), ("drop", None, False)]
)
def test_an_agent_out_of_time_ends_as_its_run_says(
    platform: Platform, quick_model: str, policy: str, reward: float | None, trainable: bool
):
    settings = {"timeouts": {"agent": 1.0}, "on_agent_timeout": policy}
    run_id = submit(platform, quick_model, [{"n": 1, **problem("[[delay:600]]")}], settings)
    wait_until_finished(platform, run_id)
    (rollout,) = rollouts(platform, run_id)
    assert (rollout["state"], rollout["termination_cause"]) == ("timed_out", "agent_timeout")
    assert (rollout["reward"], rollout["trainable"]) == (reward, trainable)
    messages = platform.value("SELECT count(*) FROM rollouts_message WHERE rollout_id = %s", rollout["id"])
    assert messages == 2, "the partial trajectory is kept"


def test_a_failing_model_server_is_infrastructure_and_never_a_reward(platform: Platform, quick_model: str):
    settings = {"max_infra_retries": 1, "timeouts": {"model_call": 2}}
    run_id = submit(platform, quick_model, [{"n": 1, **problem("[[fail:500]]")}], settings)
    wait_until_finished(platform, run_id)
    (rollout,) = rollouts(platform, run_id)
    assert (rollout["state"], rollout["termination_blame"], rollout["reward"]) == ("failed", "infrastructure", None)
    attempts = platform.rows("SELECT outcome, error FROM rollouts_attempt WHERE rollout_id = %s ORDER BY number", rollout["id"])
    assert [a["outcome"] for a in attempts] == ["queued", "failed"]
    assert "500" in attempts[-1]["error"]


def test_stopping_a_worker_hands_back_at_once_and_burns_no_retry(platform: Platform, quick_model: str):
    run_id = submit(platform, quick_model, [{"n": 4, **problem("[[delay1:15]]")}])
    wait_for_state(platform, run_id, "running", 4)
    # Its successor is there before it leaves: a node without a RUN worker for a whole lease would start these once more.
    platform.processes["leaving"] = platform.processes.pop("run")
    platform.start_worker("run", 16)
    assert platform.terminate("leaving") < 2.0
    returned = """SELECT count(*)::int FROM rollouts_rolloutevent e JOIN rollouts_rollout r ON r.id = e.rollout_id
                  WHERE r.run_id = %s AND kind = 'requeued' AND from_state = 'running'"""
    assert platform.value(returned, run_id) == 4
    wait_until_finished(platform, run_id)
    for rollout in rollouts(platform, run_id):
        assert (rollout["state"], rollout["attempt"], rollout["infra_retries"]) == ("succeeded", 2, 0)


def test_no_database_connection_is_held_during_model_calls(platform: Platform, quick_model: str):
    """Sixteen rollouts wait for the model at once, in a platform whose processes have two connections each."""
    run_id = submit(platform, quick_model, [{"n": 16, **problem("[[delay:5]]")}])
    wait_for_state(platform, run_id, "running", 16)
    here = "FROM pg_stat_activity WHERE datname = current_database()"
    assert platform.value(f"SELECT count(*) {here} AND state = 'idle in transaction'") == 0
    assert platform.value(f"SELECT count(*) {here}") < 16
    cancel(platform, run_id)
    wait_until_finished(platform, run_id)
