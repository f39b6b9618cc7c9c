"""Which rollouts a list shows, in a form that stays quick whatever is asked of however many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import Q

from rollouts.lifecycle import Blame, Cause, Fidelity, State
from rollouts.models import Environment, Group, Project, Rollout, Run, Task

MOST_BRANCHES = 50
MOST_TASKS = 2_000  # more are not named one by one

# Conditions with an index of their own in every project.
_INDEXED_BY_PROJECT = {
    "state",
    "termination_cause",
    "termination_blame",
    "fidelity",
    "node",
    "policy_version",
    "reward__gte",
    "reward__lte",
}


@dataclass(frozen=True)
class RolloutFilter:
    """None means any. Reward bounds are inclusive and leave out unknown rewards; `task` is a part of the task's key."""

    run: UUID | None = None
    group: UUID | None = None
    state: State | None = None
    environment: str | None = None
    cause: Cause | None = None
    blame: Blame | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    trainable: bool | None = None
    fidelity: Fidelity | None = None
    node: str | None = None
    version: int | None = None
    task: str | None = None

    def branches(self, projects: Sequence[Project]) -> list[Q]:
        """Conditions that together select the wanted rollouts of these projects; no rollout meets two of them.

        A planner that believes rows to be spread evenly walks the list from its newest end until the page is full, which takes
        for ever when all that match are old. So each branch begins with equal values of a column that an index keeps in the
        order of the list, or at the newest rollout of its run or environment.
        """
        conditions = self._conditions()
        narrowing = Q(**conditions)
        environments = self._environments(projects)
        tasks = self._tasks(projects)
        if environments is not None:
            narrowing &= Q(environment__in=[environment.id for environment in environments])
        if tasks is not None:
            narrowing &= Q(task__in=tasks[:MOST_TASKS] if len(tasks) <= MOST_TASKS else self._matching_tasks(projects))
        by_project = bool(_INDEXED_BY_PROJECT & set(conditions))

        if self.group is not None:
            known = Group.objects.filter(id=self.group, run__project__in=projects).exists()
            return [narrowing & Q(group=self.group)] if known else []
        if self.run is not None:
            run = Run.objects.filter(id=self.run, project__in=projects).first()
            return [narrowing & _from_its_newest(by_project, run.project_id, run=self.run)] if run else []
        if tasks is not None and len(tasks) <= MOST_BRANCHES:
            return [narrowing & Q(task=task) for task in tasks]
        if environments is not None and len(environments) <= MOST_BRANCHES:
            return [
                narrowing & _from_its_newest(by_project, environment.project_id, environment=environment.id)
                for environment in environments
            ]
        return [narrowing & Q(project=project) for project in projects]

    def _conditions(self) -> dict[str, Any]:
        wanted = {
            "run": self.run if self.group else None,
            "state": self.state and self.state.value,
            "termination_cause": self.cause and self.cause.value,
            "termination_blame": self.blame and self.blame.value,
            "reward__gte": self.reward_min,
            "reward__lte": self.reward_max,
            "trainable": self.trainable,
            "fidelity": self.fidelity and self.fidelity.value,
            "node": self.node,
            "policy_version": self.version,
        }
        return {lookup: value for lookup, value in wanted.items() if value is not None}

    def _environments(self, projects: Sequence[Project]) -> list[Environment] | None:
        if self.environment is None:
            return None
        named = Environment.objects.filter(project__in=projects, name=self.environment)
        return list(named.only("id", "project_id"))

    def _matching_tasks(self, projects: Sequence[Project]) -> Any:
        return Task.objects.filter(dataset__project__in=projects, key__icontains=self.task or "").values_list("id", flat=True)

    def _tasks(self, projects: Sequence[Project]) -> list[UUID] | None:
        """The ids of at most `MOST_TASKS` + 1 tasks."""
        return None if self.task is None else list(self._matching_tasks(projects)[: MOST_TASKS + 1])


def _from_its_newest(by_project: bool, project: UUID, **root: UUID) -> Q:
    newest = Rollout.objects.filter(**root).order_by("-id").values("id")[:1]
    found = Q(**root) & Q(id__lte=newest)
    # Said twice only where an index of the project may be the better one: else it would spoil the planner's estimate.
    return found & Q(project=project) if by_project else found
