"""The numbers of one run's page."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.contrib.postgres.fields import ArrayField
from django.db.models import Aggregate, Count, F, FloatField, Max, Min, Q
from django.utils import timezone

from rollouts.lifecycle import Stage
from rollouts.models import Group, Rollout, Run

from .dashboard import Tally
from .tallies import Cell, cells_of, counts_by_state, mean_and_std

RATE_WINDOW = dt.timedelta(minutes=5)
SAMPLE = 5_000
SOLVED_SAMPLE = 2_000
_SECONDS = {"queue": "queue_seconds", **{stage.value: f"{stage.value}_seconds" for stage in Stage}}


class _Percentiles(Aggregate):
    """PostgreSQL's `percentile_cont` at the given fractions, as a list."""

    function = "PERCENTILE_CONT"
    template = "%(function)s(ARRAY[%(fractions)s]) WITHIN GROUP (ORDER BY %(expressions)s)"

    def __init__(self, expression: str, *fractions: float, **extra: Any) -> None:
        listed = ", ".join(str(float(fraction)) for fraction in fractions)
        super().__init__(expression, fractions=listed, output_field=ArrayField(FloatField()), **extra)


class StageSeconds(NamedTuple):
    """How long the newest finished rollouts (at most `SAMPLE`) spent in a stage, in seconds."""

    stage: str
    p50: float
    p95: float


class Ending(NamedTuple):
    """How many rollouts ended for one cause."""

    cause: str
    blame: str
    n: int


class Solved(NamedTuple):
    """The newest groups (at most `SOLVED_SAMPLE`) by their scored rollouts.

    `none`: every reward is 0 or less; `all`: every reward is 1 or more;
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
    """Everything the live part of a run's page shows.

    Rates are per minute, over the last five minutes. Quantiles are those of the newest finished rollouts, at most `SAMPLE`.
    """

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
    last_change_at: dt.datetime | None

    @property
    def eta(self) -> dt.timedelta | None:
        """Time left at the present rate; None when nothing finished lately or nothing is left."""
        if not self.per_minute or not self.tally.unfinished:
            return None
        return dt.timedelta(minutes=self.tally.unfinished / self.per_minute)


def summarise(run: Run) -> RunSummary:
    """The numbers of a run, in three queries that read at most a few thousand of its finished rollouts."""
    cells = cells_of([run.pk])[run.pk]
    finished = [cell for cell in cells if cell.finished]
    n_finished = sum(cell.n for cell in finished)
    mean, std = mean_and_std(cells)
    sample = _sample(run)
    return RunSummary(
        tally=Tally(counts_by_state(cells)),
        scored=sum(cell.scored for cell in cells),
        trainable=sum(cell.trainable for cell in cells),
        reward_mean=mean,
        reward_std=std,
        reward_quantiles=sample["reward"] or (),
        turns_mean=sum(cell.turns for cell in finished) / n_finished if n_finished else None,
        prompt_tokens=sum(cell.prompt_tokens for cell in cells),
        sampled_tokens=sum(cell.sampled_tokens for cell in cells),
        retries=sum(cell.retries for cell in cells),
        stages=[StageSeconds(stage, *sample[stage]) for stage in _SECONDS if sample[stage]],
        endings=_endings(cells),
        solved=_solved(run),
        per_minute=_per_minute(run, sample),
        last_change_at=max((cell.changed_at for cell in cells), default=None),
    )


def _sample(run: Run) -> dict[str, Any]:
    """Of the newest finished rollouts: quantiles of their rewards and times, and how many finished how lately."""
    newest = Rollout.objects.filter(run=run, finished_xid__isnull=False).order_by("-finished_xid", "-id")
    started = Q(attempt__gte=1)  # the others have no times
    return Rollout.objects.filter(pk__in=newest.values("pk")[:SAMPLE]).aggregate(
        n=Count("id"),
        oldest=Min("finished_at"),
        recent=Count("id", filter=Q(finished_at__gt=timezone.now() - RATE_WINDOW)),
        reward=_Percentiles("reward", 0.1, 0.5, 0.9),
        **{stage: _Percentiles(column, 0.5, 0.95, filter=started) for stage, column in _SECONDS.items()},
    )


def _per_minute(run: Run, sample: dict[str, Any]) -> float:
    if not sample["recent"]:
        return 0.0
    now = timezone.now()
    since = max(now - RATE_WINDOW, run.created_at)
    if sample["recent"] == SAMPLE:  # there may be more within the five minutes
        since = max(since, sample["oldest"])
    return float(sample["recent"] / max((now - since).total_seconds() / 60, 1 / 60))


def _endings(cells: Sequence[Cell]) -> list[Ending]:
    counts: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        if cell.cause:
            counts[cell.cause, cell.blame] += cell.n
    return [Ending(cause, blame, n) for (cause, blame), n in counts.most_common()]


def _solved(run: Run) -> Solved:
    newest = Group.objects.filter(run=run).order_by("-id").values("id")[:SOLVED_SAMPLE]
    groups = (
        Rollout.objects.filter(group__in=newest, reward__isnull=False)
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
