"""The queue page: what waits at each stage, each run's place, and the limit that binds."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rollouts.lifecycle import Stage
from rollouts.models import LLMServer, Policy, Project, Run
from rollouts.scheduling.load import Load, PolicyLoad, read_load

from .standstill import Obstacle, obstacles
from .waits import StageWait, Waits, waits_by_run

_MOST_RUNS = 50


class StageRow(NamedTuple):
    """One stage over all nodes and projects. `slots` is what its live worker `processes` may hold at once."""

    stage: Stage
    wait: StageWait
    slots: int
    processes: int


class RunRow(NamedTuple):
    """A run with unfinished rollouts, and what holds them back."""

    run: Run
    waits: Waits
    obstacles: list[Obstacle]


class PolicyRow(NamedTuple):
    """A policy that has LLM servers."""

    policy: Policy
    servers: list[LLMServer]
    load: PolicyLoad


class Queue(NamedTuple):
    """`runs` and `policies` are those of the chosen projects; `more_runs` were left out; `others` waits for other projects."""

    stages: list[StageRow]
    runs: list[RunRow]
    policies: list[PolicyRow]
    more_runs: int
    others: Waits


def read_queue(projects: Collection[Project]) -> Queue:
    """The queue as it is now. Runs come in the order of their priority, the oldest first."""
    load = read_load()
    waits = waits_by_run()
    mine = Run.objects.filter(pk__in=waits, project__in=projects).select_related("project", "policy")
    runs = sorted(mine, key=lambda run: (-run.priority, run.pk))
    total, others = Waits(), Waits()
    chosen = {run.pk for run in runs}
    for run_id, part in waits.items():
        total.add(part)
        if run_id not in chosen:
            others.add(part)
    rows = [RunRow(run, waits[run.pk], obstacles(run, load, waits[run.pk])) for run in runs[:_MOST_RUNS]]
    return Queue(
        [_stage(load, stage, wait) for stage, wait in total.stages.items()],
        rows,
        _policies(projects, load),
        len(runs) - len(rows),
        others,
    )


def _stage(load: Load, stage: Stage, wait: StageWait) -> StageRow:
    on_nodes = [node.stages[stage] for node in load.nodes.values()]
    return StageRow(stage, wait, sum(one.limit for one in on_nodes), sum(one.processes for one in on_nodes))


def _policies(projects: Collection[Project], load: Load) -> list[PolicyRow]:
    served: dict[Policy, list[LLMServer]] = {}
    servers = LLMServer.objects.filter(project__in=projects).select_related("policy", "project")
    for server in servers.order_by("project__name", "policy__name", "url"):
        served.setdefault(server.policy, []).append(server)
    return [PolicyRow(policy, servers, load.policy(policy.pk)) for policy, servers in served.items()]
