"""What the dashboard's tables show: who may see what, runs with their progress, and rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from django.db.models import QuerySet

from rollouts.lifecycle import ACTIVE, TERMINAL, State
from rollouts.models import Project, Rollout, Run

from .tallies import cells_of, counts_by_state, mean_and_std

if TYPE_CHECKING:
    from django.contrib.auth.base_user import AbstractBaseUser
    from django.contrib.auth.models import AnonymousUser

_OTHER_ENDS = (State.CANCELLED, State.DISCARDED)


def projects_of(user: AbstractBaseUser | AnonymousUser) -> QuerySet[Project]:
    """The projects whose pages a user may open: their own, and every one for a superuser."""
    if getattr(user, "is_superuser", False):
        return Project.objects.all()
    return Project.objects.filter(members=user.pk)


@dataclass(frozen=True)
class Tally:
    """How many rollouts are in each state."""

    counts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def queued(self) -> int:
        return self.counts.get(State.QUEUED, 0)

    @property
    def active(self) -> int:
        return sum(self.counts.get(state, 0) for state in ACTIVE)

    @property
    def succeeded(self) -> int:
        return self.counts.get(State.SUCCEEDED, 0)

    @property
    def failed(self) -> int:
        return self.counts.get(State.FAILED, 0)

    @property
    def timed_out(self) -> int:
        return self.counts.get(State.TIMED_OUT, 0)

    @property
    def stopped(self) -> int:
        """Ended on purpose: cancelled or discarded."""
        return sum(self.counts.get(state, 0) for state in _OTHER_ENDS)

    @property
    def finished(self) -> int:
        return sum(self.counts.get(state, 0) for state in TERMINAL)

    @property
    def unfinished(self) -> int:
        return self.total - self.finished

    @property
    def percent(self) -> float:
        return 100 * self.finished / self.total if self.total else 0.0

    def in_order(self) -> list[tuple[State, int]]:
        """Every state that has rollouts, in the order of a rollout's life."""
        return [(state, self.counts[state]) for state in State if self.counts.get(state)]


class RunRow(NamedTuple):
    """A run as the overview lists it. `reward_mean` is over the rollouts that have a reward."""

    run: Run
    tally: Tally
    reward_mean: float | None


def run_rows(runs: Iterable[Run]) -> list[RunRow]:
    """Progress and mean reward of runs, in one query."""
    runs = list(runs)
    cells = cells_of([run.pk for run in runs])
    return [RunRow(run, Tally(counts_by_state(cells[run.pk])), mean_and_std(cells[run.pk])[0]) for run in runs]


def runs_of(projects: Iterable[Project]) -> QuerySet[Run]:
    """Runs of some projects, newest first."""
    return Run.objects.filter(project__in=list(projects)).select_related("project", "policy").order_by("-id")


def rollout_rows() -> QuerySet[Rollout]:
    """All rollouts with everything a table row or header names; to be narrowed to what the visitor may see."""
    return Rollout.objects.select_related("project", "run", "run__policy", "task", "environment", "llm_server").defer(
        "artefacts", "run__settings", "environment__config", "task__payload"
    )


def rollouts_of(projects: Iterable[Project]) -> QuerySet[Rollout]:
    """Rollouts of some projects, newest first."""
    return rollout_rows().filter(project__in=list(projects)).order_by("-id")


def any_rollouts(projects: Iterable[Project]) -> bool:
    """Whether the projects have any rollout, asked of each: for all at once Postgres may read the whole table."""
    return any(Rollout.objects.filter(project=project).exists() for project in projects)
