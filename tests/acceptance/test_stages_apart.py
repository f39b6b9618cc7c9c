"""A slow stage costs only itself: RUN goes on while INIT or EVAL take for ever. Real processes, scripted stage times."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.platform import Platform, running_platform, submit

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "benchmarks" / "plugin"  # announces the environment `staged`, whose tasks say how long each stage takes
FOR_EVER = 3600.0
SLOTS = {"init": 2, "run": 2, "eval": 2}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, rabbitmq_url: str, quick_model: str) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("stages") / "var", rabbitmq_url, ready_buffer=2) as running:
        running.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(PLUGIN)])
        running.spawn("dispatcher", "django", "dispatch")
        for stage, slots in SLOTS.items():
            running.start_worker(stage, slots)
        submit(running, quick_model, [{"n": 1, "environment": "sums", "payload": {"a": 1, "b": 1}}])
        running.wait_until_all_finished()
        running.shell(
            """
from rollouts.models import Project
from rollouts.services.registry import create_environment
create_environment(project=Project.objects.get(), name="staged", handler="staged", config={})
print("null")
"""
        )
        yield running


@pytest.fixture
def platform(shared: Platform) -> Iterator[Platform]:
    yield shared
    shared.shell(
        """
from rollouts.models import Project
from rollouts.services.cancel import cancel_rollouts
print(cancel_rollouts(project=Project.objects.get()))
"""
    )
    shared.wait_until_all_finished()


def staged(n: int, **seconds: float) -> dict[str, Any]:
    return {"n": n, "environment": "staged", "payload": {"init": 0, "run": 0, "eval": 0, **seconds}}


def ran(platform: Platform, run_id: str) -> int:
    """How many of a run have been through RUN."""
    went_on = "SELECT count(DISTINCT e.rollout_id) FROM rollouts_rolloutevent e JOIN rollouts_rollout r ON r.id = e.rollout_id"
    return int(platform.value(f"{went_on} WHERE e.from_state = 'running' AND r.run_id = %s", run_id))


def test_evaluations_that_never_end_hold_up_no_run(platform: Platform, quick_model: str):
    run_id = submit(platform, quick_model, [staged(20, eval=FOR_EVER)])
    platform.wait_for(lambda: ran(platform, run_id) == 20, "all to be through RUN")
    held = "SELECT count(*) FROM rollouts_rollout WHERE state = 'evaluating' AND lease_owner_id IS NOT NULL"
    platform.wait_for(lambda: platform.value(held) == SLOTS["eval"], "EVAL to be full")


def test_preparations_that_never_end_hold_up_only_their_slot(platform: Platform, quick_model: str):
    stuck = submit(platform, quick_model, [staged(1, init=FOR_EVER)], {"timeouts": {"init": FOR_EVER}})
    initializing = "SELECT count(*) FROM rollouts_rollout WHERE state = 'initializing' AND run_id = %s"
    platform.wait_for(lambda: platform.value(initializing, stuck) == 1, "one to take its INIT slot for ever")
    run_id = submit(platform, quick_model, [staged(20)])
    platform.wait_for(lambda: ran(platform, run_id) == 20, "all others to be through RUN")
    assert platform.value(initializing, stuck) == 1


def test_while_run_is_full_prepared_rollouts_wait_in_front_of_it(platform: Platform, quick_model: str):
    """So that a RUN slot that comes free has its next rollout there, however long INIT takes."""
    submit(platform, quick_model, [staged(8, run=FOR_EVER)], {"timeouts": {"agent": FOR_EVER}})
    by_state = "SELECT state, count(*)::int AS n FROM rollouts_rollout WHERE finished_at IS NULL GROUP BY state"
    expected = {"running": SLOTS["run"], "ready": 2, "queued": 4}
    platform.wait_for(lambda: {row["state"]: row["n"] for row in platform.rows(by_state)} == expected, "a full READY buffer")
