"""Cancelling: at once where nobody holds the rollout, else by asking its worker, which looks every few seconds."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from django.db import connection, transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from rollouts.lifecycle import UNFINISHED, WAITING, EventKind
from rollouts.models import Project, Rollout, Run

from .finish import finish_cancelled
from .transition import Guard

_BATCH = 1000

_ASK = """
WITH asked AS (
    UPDATE rollouts_rollout SET cancel_requested_at = now()
    WHERE id = ANY(%s) AND lease_owner_id IS NOT NULL AND cancel_requested_at IS NULL RETURNING id, attempt, state
)
INSERT INTO rollouts_rolloutevent (rollout_id, attempt, at, kind, from_state, to_state, data)
SELECT id, attempt, now(), %s, state, '', '{}' FROM asked
"""


def cancel_rollouts(
    *, project: Project, rollout_id: UUID | None = None, group_id: UUID | None = None, run_id: UUID | None = None
) -> int:
    """Cancel one rollout, a group's or a run's. How many were still going; asking again is harmless.

    First the workers are asked that hold any, then all are gone through in short transactions with their rows locked: each is
    either ended there, or its worker is asked. One that is handed on after that is ended by the rescuer.
    """
    rollouts = Rollout.objects.filter(project=project, state__in=[state.value for state in UNFINISHED])
    if rollout_id is not None:
        rollouts = rollouts.filter(id=rollout_id)
    if group_id is not None:
        rollouts = rollouts.filter(group_id=group_id)
    if run_id is not None:
        rollouts = rollouts.filter(run_id=run_id)
        Run.objects.filter(id=run_id, project=project, cancelled_at=None).update(cancelled_at=timezone.now())
    reached = _stop_some(rollouts.filter(lease_owner__isnull=False).order_by("id"))
    last = UUID(int=0)
    while ids := _stop_some(rollouts.filter(id__gt=last).order_by("id")[:_BATCH]):
        reached |= ids
        last = max(ids)
    return len(reached)


def finish_cancels() -> None:
    """Go on where the cancelling of a large run was cut short."""
    for run in Run.objects.filter(cancelled_at__isnull=False, finished_rollouts__lt=F("used_rollouts")).select_related(
        "project"
    ):
        cancel_rollouts(project=run.project, run_id=run.id)


def _stop_some(rollouts: QuerySet[Rollout]) -> set[UUID]:
    with transaction.atomic():
        ids = list(rollouts.select_for_update().values_list("id", flat=True))
        stop(ids)
    return set(ids)


def stop(ids: Sequence[UUID]) -> None:
    """End those that nobody holds, ask the workers of the others. Wants a transaction in which the rows are locked."""
    finish_cancelled(ids=ids, guard=Guard(states=WAITING, unheld=True), phase=None, stage=None)
    with connection.cursor() as cursor:
        cursor.execute(_ASK, [list(ids), EventKind.CANCEL_REQUESTED.value])
