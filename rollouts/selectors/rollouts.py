"""Runs, groups and rollouts of a project, with the counts and filters that lists need."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from django.db.models import Count, QuerySet

from rollouts.lifecycle import TERMINAL, State
from rollouts.models import Group, Project, Reward, Rollout, RolloutEvent, Run

from .tallies import cells_of, counts_by_state

Counts = dict[str, int]  # every state -> how many rollouts are in it


def runs_of(project: Project) -> QuerySet[Run]:
    return Run.objects.filter(project=project).select_related("policy")


def groups_of(project: Project) -> QuerySet[Group]:
    return Group.objects.filter(run__project=project).select_related("task__dataset")


def listed_rollouts() -> QuerySet[Rollout]:
    """All rollouts with what a list names; to be narrowed to what the asker may see."""
    return Rollout.objects.select_related("environment", "task").defer("artefacts", "task__payload", "environment__config")


def rollouts_of(project: Project) -> QuerySet[Rollout]:
    return listed_rollouts().filter(project=project)


def events_of(rollout: Rollout) -> QuerySet[RolloutEvent]:
    return RolloutEvent.objects.filter(rollout=rollout)


def rewards_of(rollout: Rollout) -> QuerySet[Reward]:
    """All versions, oldest first."""
    return Reward.objects.filter(rollout=rollout).order_by("version", "id")


def run_counts(run: Run) -> Counts:
    return _complete(counts_by_state(cells_of([run.pk])[run.pk]))


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
