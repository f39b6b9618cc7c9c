"""Sandboxes as rollouts see them: which are still needed, and what stopping them came to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef
from django.db.models.functions import Now
from django.utils import timezone

from rollouts import metrics
from rollouts.lifecycle import ACTIVE, EventKind, RescoringState
from rollouts.models import Node, Rescoring, Rollout, RolloutEvent, WorkerProcess
from sandboxes.models import Sandbox
from sandboxes.services import abandon, note_stop_failed, note_stopped

from . import metering
from .storable import storable_text

# A worker that lost its rollout stops the sandbox itself; the janitor leaves it this much time.
_PATIENCE = timedelta(seconds=10)


def unneeded_sandboxes(*, node: str, present: Sequence[str]) -> list[str]:
    """Names to stop: rows not proven stopped whose attempt or holder is gone, and `present` directories without such a row.

    Those whose stop has just failed are left out until their pause is over.
    """
    now = timezone.now()
    current = Rollout.objects.filter(
        id=OuterRef("rollout_id"), attempt=OuterRef("attempt"), state__in=[state.value for state in ACTIVE]
    )
    rescoring = Rescoring.objects.filter(sandbox_name=OuterRef("name"), state=RescoringState.RUNNING.value)
    holder = WorkerProcess.objects.filter(id=OuterRef("holder"), stopped_at=None, lost_at=None, lease_expires_at__gt=Now())
    needed = Exists(current) | Exists(rescoring) | Exists(holder)
    rows = Sandbox.objects.filter(node=node, stopped_at=None).annotate(needed=needed)
    known = {sandbox.name: sandbox for sandbox in rows}
    over = [
        name
        for name, sandbox in known.items()
        if not sandbox.needed
        and sandbox.created_at < now - _PATIENCE
        and (sandbox.stop_retry_at is None or sandbox.stop_retry_at <= now)
    ]
    unknown = [name for name in present if name not in known]
    return over + unknown


def note_torn_down(*, name: str, reason: str) -> None:
    """Nothing of it is left. When that took several tries, the rollout's history says so."""
    with transaction.atomic():
        failed = Sandbox.objects.filter(name=name, stopped_at=None, stop_attempts__gt=0).first()
        note_stopped(name=name, reason=reason)
        if failed is not None:
            _note_in_history(failed, {"stopped_after_failures": failed.stop_attempts})


def note_teardown_failure(*, name: str, error: str, processes: Sequence[int] = ()) -> None:
    """Something of it survived: counted, kept in its row, and the first time also in the rollout's history."""
    with transaction.atomic():
        sandbox = note_stop_failed(name=name, error=storable_text(error))
        if sandbox is None:
            return
        metering.count(metrics.TEARDOWN_FAILURES, {"backend": sandbox.backend})
        if sandbox.stop_attempts == 1:
            _note_in_history(sandbox, {"stop_failed": sandbox.stop_error, "processes": list(processes)})


def abandon_sandboxes_of_lost_nodes() -> int:
    """Close the rows of nodes that were not seen for `NODE_GONE_SECONDS`; how many. Nobody can prove anything of them.

    By the database's clock: a node with a wrong one would close those of all nodes, and their janitors stop what has no row.
    """
    since = Now() - timedelta(seconds=settings.NODE_GONE_SECONDS)
    alive = Node.objects.filter(name=OuterRef("node"), last_seen_at__gte=since)
    with transaction.atomic():
        lost = Sandbox.objects.filter(~Exists(alive), created_at__lt=since)
        closed = abandon(lost, reason="its node is gone; not proven empty")
        if closed:
            metering.count(metrics.SANDBOXES_ABANDONED, {}, closed)
    return closed


def _note_in_history(sandbox: Sandbox, data: dict[str, object]) -> None:
    if sandbox.rollout_id is None or sandbox.attempt is None:  # a warm one
        return
    if rollout := Rollout.objects.only("id").filter(id=sandbox.rollout_id).first():
        RolloutEvent.objects.create(
            rollout=rollout,
            attempt=sandbox.attempt,
            kind=EventKind.SANDBOX.value,
            data={"sandbox": sandbox.name, "node": sandbox.node, **data},
        )
