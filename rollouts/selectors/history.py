"""A rollout's attempts with the failures of their stages, and its rescorings."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from django.db.models import QuerySet

from rollouts.models import Attempt, Rescoring, Rollout, Run, StageFailure


class AttemptHistory(NamedTuple):
    """An attempt and what failed in it, both oldest first. EVAL may have failed several times."""

    attempt: Attempt
    failures: list[StageFailure]


def attempts_of(rollout: Rollout) -> list[AttemptHistory]:
    """All attempts in two queries, oldest first."""
    failures: defaultdict[int, list[StageFailure]] = defaultdict(list)
    for failure in StageFailure.objects.filter(rollout=rollout).order_by("id"):
        failures[failure.attempt].append(failure)
    attempts = Attempt.objects.filter(rollout=rollout).order_by("number")
    return [AttemptHistory(attempt, failures[attempt.number]) for attempt in attempts]


def rescorings_of(scope: Rollout | Run) -> QuerySet[Rescoring]:
    """Of a rollout or a run."""
    narrowed = {"rollout": scope} if isinstance(scope, Rollout) else {"run": scope}
    return Rescoring.objects.filter(**narrowed).select_related("environment")
