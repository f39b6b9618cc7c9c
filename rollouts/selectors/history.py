"""A rollout's attempts with the failures of their stages, and its rescorings."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from django.db.models import QuerySet

from rollouts.models import Attempt, Rescoring, Rollout, Run, StageFailure
from sandboxes.models import Sandbox

from .images import names_of


class UsedSandbox(NamedTuple):
    """A sandbox with the names of the images that have what it was started from now; "" for the system of its node."""

    sandbox: Sandbox
    image: str


class AttemptHistory(NamedTuple):
    """An attempt, what failed in it and its sandboxes, all oldest first. EVAL may have failed several times."""

    attempt: Attempt
    failures: list[StageFailure]
    sandboxes: list[UsedSandbox]


def attempts_of(rollout: Rollout) -> list[AttemptHistory]:
    """All attempts in four queries, oldest first."""
    failures: defaultdict[int, list[StageFailure]] = defaultdict(list)
    for failure in StageFailure.objects.filter(rollout=rollout).order_by("id"):
        failures[failure.attempt].append(failure)
    used = list(Sandbox.objects.filter(rollout_id=rollout.pk).order_by("created_at"))
    images = names_of(sandbox.image for sandbox in used)
    sandboxes: defaultdict[int | None, list[UsedSandbox]] = defaultdict(list)
    for sandbox in used:
        sandboxes[sandbox.attempt].append(UsedSandbox(sandbox, images.get(sandbox.image, sandbox.image)))
    attempts = Attempt.objects.filter(rollout=rollout).order_by("number")
    return [AttemptHistory(attempt, failures[attempt.number], sandboxes[attempt.number]) for attempt in attempts]


def rescorings_of(scope: Rollout | Run) -> QuerySet[Rescoring]:
    """Of a rollout or a run."""
    narrowed = {"rollout": scope} if isinstance(scope, Rollout) else {"run": scope}
    return Rescoring.objects.filter(**narrowed).select_related("environment")
