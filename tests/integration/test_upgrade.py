"""A database of an earlier release is brought to this one, with all that was under way in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from rollouts.models import LLMServer, Rollout
from rollouts.selectors.trajectory import trajectories
from rollouts.services.assign import choose_servers

pytestmark = pytest.mark.django_db(transaction=True)

BEFORE = "0004_node_sandboxes"


def migrate(to: str) -> Any:
    """The models as they were then."""
    executor = MigrationExecutor(connection)
    executor.migrate([("rollouts", to)])
    return MigrationExecutor(connection).loader.project_state([("rollouts", to)]).apps


@pytest.fixture
def newest() -> Iterator[str]:
    """Whatever happens, other tests find the newest tables."""
    [(_, name)] = MigrationExecutor(connection).loader.graph.leaf_nodes("rollouts")
    yield name
    migrate(name)


def test_servers_and_rollouts_are_kept(newest: str) -> None:
    old = migrate(BEFORE)
    project = old.get_model("rollouts", "Project").objects.create(name="alpha")
    policy = old.get_model("rollouts", "Policy").objects.create(project=project, name="tiny")
    known = {"project": project, "policy": policy, "model": "m", "max_model_len": 99}
    servers = {
        state: old.get_model("rollouts", "LLMServer").objects.create(
            url=f"http://{state}", state=state, capabilities={"version": "0.10", "models": ["m"]}, **known
        )
        for state in ("live", "dead", "paused")
    }
    environment = old.get_model("rollouts", "Environment").objects.create(
        project=project, name="e", version=1, handler="code", config={}
    )
    run = old.get_model("rollouts", "Run").objects.create(project=project, policy=policy, name="r", settings={})
    dataset = old.get_model("rollouts", "Dataset").objects.create(project=project, environment=environment, name="d")
    task = old.get_model("rollouts", "Task").objects.create(dataset=dataset, key="1")
    group = old.get_model("rollouts", "Group").objects.create(run=run, task=task, n=2)
    part = {"project": project, "run": run, "group": group, "environment": environment, "task": task}
    worker = old.get_model("rollouts", "WorkerProcess").objects.create(
        node="n", stage="run", pid=1, concurrency=1, lease_expires_at="2030-01-01T00:00Z"
    )
    rollouts = old.get_model("rollouts", "Rollout").objects
    rollouts.create(index=0, state="queued", **part)
    row = rollouts.create(index=1, state="running", attempt=1, lease_owner=worker, llm_server=servers["live"], node="n", **part)
    call = {"prompt_tokens": 2, "policy": "tiny", "policy_version": 0, "finish_reason": "stop", "latency": 0.1}
    old.get_model("rollouts", "ModelCall").objects.create(
        rollout=row, attempt=1, turn=0, context_ids=[1, 2], sampled_ids=[3], logprobs=[-0.5], **call
    )

    migrate(newest)
    admissions = {s.url: (s.admission, s.health, s.engine, s.hold) for s in LLMServer.objects.all()}
    assert admissions == {
        "http://live": ("open", "suspect", "vllm", ""),  # nobody has asked it yet what it can do
        "http://dead": ("open", "dead", "vllm", ""),
        "http://paused": ("paused", "suspect", "vllm", ""),
    }
    queued, running = Rollout.objects.order_by("index")
    assert (running.state, running.llm_server_id) == ("running", servers["live"].id)
    trajectory = trajectories([running])[running.id]
    assert (trajectory.token_problem, trajectory.message_pictures) == ("", [])
    [segment] = trajectory.segments()
    assert (segment.ids, segment.placed) == ([1, 2, 3], [])
    assert choose_servers([queued.id]) == {}
    LLMServer.objects.filter(url="http://live").update(health="live", capabilities={"features": ["token_ids"]})
    assert choose_servers([queued.id, running.id]) == {id_: servers["live"].id for id_ in (queued.id, running.id)}
