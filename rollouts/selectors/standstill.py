"""Why nothing moves: what a waiting run is missing."""

from __future__ import annotations

import datetime as dt
from typing import NamedTuple

from django.db.models import Count, Max, Min, Q
from django.utils import timezone

from rollouts.lifecycle import STAGES, TERMINAL, Stage, State
from rollouts.models import LLMServer, Rollout, Run, WorkerProcess

_UNFINISHED = [state.value for state in State if state not in TERMINAL]


class Obstacle(NamedTuple):
    """One reason, and what to do about it."""

    reason: str
    remedy: str


def obstacles(run: Run) -> list[Obstacle]:
    """What keeps the rollouts of a run waiting, worst first; empty when all of them can move or are done."""
    waiting = {
        Stage.INIT: Q(state=State.QUEUED),
        Stage.RUN: Q(state=State.READY),
        Stage.EVAL: Q(state=State.EVALUATING, lease_owner=None),
    }
    now = timezone.now()
    numbers = Rollout.objects.filter(run=run, state__in=_UNFINISHED).aggregate(
        unfinished=Count("id"),
        delayed=Count("id", filter=Q(state=State.QUEUED, not_before__gt=now)),
        delayed_from=Min("not_before", filter=Q(state=State.QUEUED, not_before__gt=now)),
        delayed_until=Max("not_before", filter=Q(state=State.QUEUED, not_before__gt=now)),
        **{stage.value: Count("id", filter=condition) for stage, condition in waiting.items()},
    )
    if not numbers["unfinished"]:
        return []
    found = []
    alive = _live_stages(now)
    for stage in Stage:
        if numbers[stage.value] and stage not in alive:
            state = STAGES[stage].waits_in.value
            found.append(
                Obstacle(
                    f"No {stage.upper()} worker is alive; {_rollouts(numbers[stage.value])} {state}.",
                    f"Start one on a node with “python -m django work {stage.value}”, or look at the worker processes.",
                )
            )
    if not LLMServer.objects.filter(policy=run.policy, state=LLMServer.Health.LIVE).exists():
        found.append(
            Obstacle(
                f"No live LLM server serves the policy {run.policy.name}.",
                "Register one, resume a paused one, or look at the last error of a dead one.",
            )
        )
    if numbers["delayed"]:
        until = f"{numbers['delayed_from']:%H:%M:%S}"
        if numbers["delayed"] > 1:
            until = f"between {until} and {numbers['delayed_until']:%H:%M:%S}"
        found.append(
            Obstacle(
                f"{_rollouts(numbers['delayed']).capitalize()} for another try after an infrastructure failure.",
                f"They go on by themselves {until} UTC; their attempts tell what went wrong.",
            )
        )
    return found


def _live_stages(now: dt.datetime) -> set[str]:
    live = WorkerProcess.objects.filter(stopped_at=None, lost_at=None, lease_expires_at__gt=now)
    return set(live.order_by().values_list("stage", flat=True).distinct())


def _rollouts(n: int) -> str:
    return f"{n} rollout waits" if n == 1 else f"{n} rollouts wait"
