"""Warm sandboxes in a real worker: rollouts take them, others take their place, and none outlives the worker."""

from __future__ import annotations

from pathlib import Path

from tests.acceptance.platform import Platform, running_platform, submit

_WARM = "SELECT count(*) FROM sandboxes_sandbox WHERE holder IS NOT NULL AND ready_at IS NOT NULL AND stopped_at IS NULL"
_ALL = "SELECT count(*) FROM sandboxes_sandbox WHERE stopped_at IS NULL"


def finished_rollouts(platform: Platform, model: str, n: int) -> list[str]:
    """The names of the sandboxes of `n` rollouts that were carried out."""
    payload = {"question": "[[reply:\\boxed{4}]]", "expected_answer": "4"}
    run_id = submit(platform, model, [{"n": n, "environment": "math", "payload": payload}])
    platform.wait_until_all_finished()
    rows = platform.rows("SELECT id, state, attempt FROM rollouts_rollout WHERE run_id = %s", run_id)
    assert {row["state"] for row in rows} == {"succeeded"}
    return [f"prorl-{row['id'].hex}-{row['attempt']}" for row in rows]


def test_rollouts_take_warm_sandboxes(tmp_path: Path, quick_model: str):
    with running_platform(tmp_path / "var", sandbox_warm=2) as platform:
        platform.start_execution()
        finished_rollouts(platform, quick_model, 1)
        platform.wait_for(lambda: platform.value(_WARM) == 2, "two warm sandboxes")
        names = finished_rollouts(platform, quick_model, 2)
        reasons = {row["stop_reason"] for row in platform.rows("SELECT stop_reason FROM sandboxes_sandbox")}
        assert {f"handed over to {name}" for name in names} <= reasons
        platform.wait_for(lambda: platform.value(_WARM) == 2, "others in their place")
        platform.terminate("init")
        platform.start_worker("init")  # its janitor ends what the first one had no time for
        platform.wait_for(lambda: platform.value(_ALL) == 0, "the end of all sandboxes")
