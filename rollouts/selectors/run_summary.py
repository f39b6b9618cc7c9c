"""The numbers of one run's page."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.contrib.postgres.fields import ArrayField
from django.db.models import Aggregate, Avg, Count, F, FloatField, Max, Min, Q, StdDev, Sum
from django.utils import timezone

from rollouts.lifecycle import Stage
from rollouts.models import Group, Rollout, Run

from .dashboard import Tally

RATE_WINDOW = dt.timedelta(minutes=5)
STAGE_SAMPLE = 5_000
_SECONDS = {"queue": "queue_seconds", **{stage.value: f"{stage.value}_seconds" for stage in Stage}}


class _Percentiles(Aggregate):
    """PostgreSQL's `percentile_cont` at the given fractions, as a list."""

    function = "PERCENTILE_CONT"
    template = "%(function)s(ARRAY[%(fractions)s]) WITHIN GROUP (ORDER BY %(expressions)s)"

    def __init__(self, expression: str, *fractions: float, **extra: Any) -> None:
        listed = ", ".join(str(float(fraction)) for fraction in fractions)
        super().__init__(expression, fractions=listed, output_field=ArrayField(FloatField()), **extra)


class StageSeconds(NamedTuple):
    """How long the newest finished rollouts (at most `STAGE_SAMPLE`) spent in a stage, in seconds."""

    stage: str
    p50: float
    p95: float


class Ending(NamedTuple):
    """How many rollouts ended for one cause."""

    cause: str
    blame: str
    n: int


class Solved(NamedTuple):
    """Groups by their scored rollouts. `none`: every reward is 0 or less; `all`: every reward is 1 or more.

    `flat` groups have at least two scored rollouts and no spread, so a group-relative advantage of 0.
    """

    none: int
    some: int
    all: int
    flat: int

    @property
    def scored(self) -> int:
        return self.none + self.some + self.all


@dataclass(frozen=True)
class RunSummary:
    """Everything the live part of a run's page shows. Rates are per minute, over the last five minutes."""

    tally: Tally
    scored: int
    trainable: int
    reward_mean: float | None
    reward_std: float | None
    reward_quantiles: Sequence[float]  # p10, p50, p90; empty without rewards
    turns_mean: float | None
    prompt_tokens: int
    sampled_tokens: int
    retries: int
    stages: list[StageSeconds]
    endings: list[Ending]
    solved: Solved
    per_minute: float
    started_at: dt.datetime | None
    last_change_at: dt.datetime | None

    @property
    def eta(self) -> dt.timedelta | None:
        """Time left at the present rate; None when nothing finished lately or nothing is left."""
        if not self.per_minute or not self.tally.unfinished:
            return None
        return dt.timedelta(minutes=self.tally.unfinished / self.per_minute)


def summarise(run: Run) -> RunSummary:
    """The numbers of a run, in five queries."""
    rollouts = Rollout.objects.filter(run=run).order_by()
    states = rollouts.values("state").annotate(n=Count("id"))
    now = timezone.now()
    totals = rollouts.aggregate(
        scored=Count("reward"),
        trainable=Count("id", filter=Q(trainable=True)),
        reward_mean=Avg("reward"),
        reward_std=StdDev("reward"),
        reward_quantiles=_Percentiles("reward", 0.1, 0.5, 0.9),
        turns_mean=Avg("turns", filter=Q(finished_at__isnull=False)),
        prompt=Sum("prompt_tokens", default=0),
        sampled=Sum("sampled_tokens", default=0),
        retries=Sum("infra_retries", default=0),
        recent=Count("id", filter=Q(finished_at__gt=now - RATE_WINDOW)),
        first=Min("created_at"),
        last=Max("state_changed_at"),
    )
    window = min(RATE_WINDOW, now - totals["first"]) if totals["first"] else RATE_WINDOW
    return RunSummary(
        tally=Tally({row["state"]: row["n"] for row in states}),
        scored=totals["scored"],
        trainable=totals["trainable"],
        reward_mean=totals["reward_mean"],
        reward_std=totals["reward_std"],
        reward_quantiles=totals["reward_quantiles"] or (),
        turns_mean=totals["turns_mean"],
        prompt_tokens=totals["prompt"],
        sampled_tokens=totals["sampled"],
        retries=totals["retries"],
        stages=_stages(run),
        endings=_endings(run),
        solved=_solved(run),
        per_minute=totals["recent"] / max(window.total_seconds() / 60, 1 / 60),
        started_at=totals["first"],
        last_change_at=totals["last"],
    )


def _stages(run: Run) -> list[StageSeconds]:
    newest = Rollout.objects.filter(run=run, finished_xid__isnull=False, attempt__gte=1).order_by("-finished_xid", "-id")
    spent = Rollout.objects.filter(pk__in=newest.values("pk")[:STAGE_SAMPLE]).aggregate(
        **{stage: _Percentiles(column, 0.5, 0.95) for stage, column in _SECONDS.items()}
    )
    return [StageSeconds(stage, *values) for stage, values in spent.items() if values]


def _endings(run: Run) -> list[Ending]:
    rows = (
        Rollout.objects.filter(run=run)
        .exclude(termination_cause="")
        .order_by()
        .values_list("termination_cause", "termination_blame")
        .annotate(n=Count("id"))
    )
    return sorted((Ending(*row) for row in rows), key=lambda ending: -ending.n)


def _solved(run: Run) -> Solved:
    groups = (
        Rollout.objects.filter(run=run, reward__isnull=False)
        .order_by()
        .values("group_id")
        .annotate(low=Min("reward"), high=Max("reward"), scored=Count("id"))
    )
    none, everything = Q(high__lte=0), Q(low__gte=1)
    counts = groups.aggregate(
        total=Count("group_id"),
        none=Count("group_id", filter=none),
        all=Count("group_id", filter=everything),
        flat=Count("group_id", filter=Q(scored__gt=1, low=F("high"))),
    )
    return Solved(counts["none"], counts["total"] - counts["none"] - counts["all"], counts["all"], counts["flat"])


class GroupRow(NamedTuple):
    """A group with its rollouts in the order of their index."""

    group: Group
    rollouts: list[Rollout]

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def flat(self) -> bool:
        """No learning signal: at least two rewards, all the same."""
        return len(self.rewards) > 1 and len(set(self.rewards)) == 1


def group_rows(groups: Sequence[Group]) -> list[GroupRow]:
    """The rollouts of some groups, in one query."""
    members: dict[Any, list[Rollout]] = {group.pk: [] for group in groups}
    fields = ("id", "group_id", "index", "state", "reward", "termination_cause", "termination_blame")
    for rollout in Rollout.objects.filter(group__in=list(members)).only(*fields).order_by("group_id", "index"):
        members[rollout.group_id].append(rollout)
    return [GroupRow(group, members[group.pk]) for group in groups]
