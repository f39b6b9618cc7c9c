"""Runs, groups and rollouts of a project, with the counts and filters that lists need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Count, QuerySet

from rollouts.lifecycle import TERMINAL, Blame, Cause, State
from rollouts.models import Group, Project, Reward, Rollout, RolloutEvent, Run

Counts = dict[str, int]  # every state -> how many rollouts are in it


@dataclass(frozen=True)
class RolloutFilter:
    """Which rollouts to list; None means any. Reward bounds are inclusive and leave out unknown rewards."""

    run: UUID | None = None
    group: UUID | None = None
    state: State | None = None
    environment: str | None = None
    cause: Cause | None = None
    blame: Blame | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    trainable: bool | None = None

    def lookups(self) -> dict[str, object]:
        wanted = {
            "run_id": self.run,
            "group_id": self.group,
            "state": self.state and self.state.value,
            "environment__name": self.environment,
            "termination_cause": self.cause and self.cause.value,
            "termination_blame": self.blame and self.blame.value,
            "reward__gte": self.reward_min,
            "reward__lte": self.reward_max,
            "trainable": self.trainable,
        }
        return {lookup: value for lookup, value in wanted.items() if value is not None}


def runs_of(project: Project) -> QuerySet[Run]:
    return Run.objects.filter(project=project).select_related("policy")


def groups_of(project: Project) -> QuerySet[Group]:
    return Group.objects.filter(run__project=project).select_related("task__dataset")


def rollouts_of(project: Project, wanted: RolloutFilter = RolloutFilter()) -> QuerySet[Rollout]:
    return (
        Rollout.objects.filter(project=project, **wanted.lookups())
        .select_related("environment", "task")
        .defer("artefacts", "task__payload", "environment__config")
    )


def events_of(rollout: Rollout) -> QuerySet[RolloutEvent]:
    return RolloutEvent.objects.filter(rollout=rollout)


def rewards_of(rollout: Rollout) -> QuerySet[Reward]:
    """All versions, oldest first."""
    return Reward.objects.filter(rollout=rollout).order_by("version", "id")


def run_counts(run: Run) -> Counts:
    counted = Rollout.objects.filter(run=run).order_by().values_list("state").annotate(Count("id"))
    return _complete(dict(counted))


def group_counts(groups: Iterable[Group]) -> dict[UUID, Counts]:
    """Counts of several groups in one query."""
    found: dict[UUID, Counts] = {group.id: {} for group in groups}
    counted = Rollout.objects.filter(group_id__in=list(found)).order_by().values_list("group_id", "state").annotate(Count("id"))
    for group_id, state, count in counted:
        found[group_id][state] = count
    return {group_id: _complete(counts) for group_id, counts in found.items()}


def progress(counts: Counts) -> float:
    """The share of rollouts that have ended; 0 when there are none."""
    total = sum(counts.values())
    return sum(counts[state] for state in TERMINAL) / total if total else 0.0


def _complete(counts: Counts) -> Counts:
    return {state.value: counts.get(state.value, 0) for state in State}
