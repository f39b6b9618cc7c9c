"""An agent that takes more than its sandbox may have: the policy's end, scored as far as it came, and the node goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.platform import Platform, call_bash, platform_with_notes, play, submit

LIMITS = {"memory_mb": 300, "processes": 40, "disk_mb": 50, "flood_mb": 20}

HOGS = {
    "memory_mb": """for i in 1 2 3 4; do python3 -c "import time; x = b'x' * 120_000_000; time.sleep(60)" & done; wait""",
    "processes": "hog() { hog | hog & sleep 60; }; hog",
    "disk_mb": "head -c 60M /dev/zero > filler; sleep 60",
    "flood_mb": "yes",
}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, quick_model: str) -> Iterator[Platform]:
    judge = tmp_path_factory.mktemp("judge")
    (judge / "here").touch()
    folder: Path = tmp_path_factory.mktemp("limits")
    with platform_with_notes(folder, quick_model, judge=str(judge), limits=LIMITS) as running:
        yield running


@pytest.mark.parametrize("limit", HOGS)
def test_a_hog_ends_as_its_policys_doing_and_is_scored(platform: Platform, quick_model: str, limit: str):
    question = call_bash(f"echo 1 > note.txt; {HOGS[limit]}") + "[[reply2:never asked]]"
    [rollout] = play(platform, quick_model, question)
    assert (rollout["state"], rollout["termination_cause"], rollout["termination_blame"]) == (
        "succeeded",
        "sandbox_limit",
        "policy",
    )
    assert rollout["termination_detail"].startswith(f"{limit}: ")
    assert (rollout["reward"], rollout["trainable"], rollout["attempt"]) == (1.0, True, 1)
    [call] = platform.rows("SELECT * FROM rollouts_toolcall WHERE rollout_id = %s", rollout["id"])
    assert call["limit_exceeded"] == limit

    [next_one] = play(platform, quick_model, call_bash("echo 2 > note.txt") + "[[reply2:Done.]]")
    assert (next_one["termination_cause"], next_one["reward"]) == ("completed", 1.0)


@pytest.mark.parametrize(("environment", "component"), [("notes", "dated"), ("bare-notes", "sandbox_limit")])
def test_an_agent_whose_sandbox_was_ended_gets_nothing(platform: Platform, quick_model: str, environment: str, component: str):
    """Evaluation takes place in a sandbox, which one of the environments can rebuild."""
    platform.shell(CREATE_SHORT_LIVED.format(environment=environment))
    run_id = submit(
        platform,
        quick_model,
        [
            {
                "n": 1,
                "environment": f"short-lived-{environment}",
                "payload": {"question": call_bash("echo 1 > note.txt; sleep 60")},
            }
        ],
    )
    platform.wait_until_all_finished()
    [rollout] = platform.rows("SELECT * FROM rollouts_rollout WHERE run_id = %s", run_id)
    assert (rollout["state"], rollout["termination_cause"], rollout["trainable"]) == ("succeeded", "sandbox_limit", True)
    assert rollout["termination_detail"].startswith("wall_seconds: ")
    rewards = platform.rows("SELECT name, value FROM rollouts_reward WHERE rollout_id = %s", rollout["id"])
    assert rewards == [{"name": component, "value": 0.0}]


CREATE_SHORT_LIVED = """
from rollouts.models import Environment, Project
from rollouts.services.registry import create_environment
config = {{**Environment.objects.get(name="notes").config, "limits": {{"wall_seconds": 8}}}}
create_environment(
    project=Project.objects.get(), name="short-lived-{environment}", handler="{environment}", config=config
)
print("null")
"""
