"""A rollout's attempts with the failures of their stages, and its rescorings."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from django.db.models import QuerySet

from rollouts.models import Attempt, Rescoring, Rollout, Run, StageFailure
from sandboxes.models import Sandbox


class AttemptHistory(NamedTuple):
    """An attempt, what failed in it and its sandboxes, all oldest first. EVAL may have failed several times."""

    attempt: Attempt
    failures: list[StageFailure]
    sandboxes: list[Sandbox]


def attempts_of(rollout: Rollout) -> list[AttemptHistory]:
    """All attempts in three queries, oldest first."""
    failures: defaultdict[int, list[StageFailure]] = defaultdict(list)
    for failure in StageFailure.objects.filter(rollout=rollout).order_by("id"):
        failures[failure.attempt].append(failure)
    sandboxes: defaultdict[int | None, list[Sandbox]] = defaultdict(list)
    for sandbox in Sandbox.objects.filter(rollout_id=rollout.pk).order_by("created_at"):
        sandboxes[sandbox.attempt].append(sandbox)
    attempts = Attempt.objects.filter(rollout=rollout).order_by("number")
    return [AttemptHistory(attempt, failures[attempt.number], sandboxes[attempt.number]) for attempt in attempts]


def rescorings_of(scope: Rollout | Run) -> QuerySet[Rescoring]:
    """Of a rollout or a run."""
    narrowed = {"rollout": scope} if isinstance(scope, Rollout) else {"run": scope}
    return Rescoring.objects.filter(**narrowed).select_related("environment")
