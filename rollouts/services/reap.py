"""The rescuer: takes back what lost worker processes held, and what waits on nodes that are gone."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef
from django.utils import timezone

from rollouts import metrics
from rollouts.lifecycle import PHASES, STAGES, WAITING, Stage, State
from rollouts.models import Rollout, WorkerProcess

from . import metering
from .finish import finish_cancelled, give_up_lost, hand_back
from .transition import Guard


def reap() -> int:
    """One pass; how many rollouts were taken back. Safe to run at any time and more than once."""
    _declare_lost()
    _end_cancelled_in_waiting()
    return _take_back_from_lost_workers() + _take_back_from_lost_nodes()


def _end_cancelled_in_waiting() -> None:
    """Rollouts whose worker handed them on in the moment between the asking and its next heartbeat."""
    asked = Rollout.objects.filter(cancel_requested_at__isnull=False, finished_at=None, lease_owner=None)
    ids = list(asked.values_list("id", flat=True))
    if ids:
        finish_cancelled(ids=ids, guard=Guard(WAITING, unheld=True), phase=None, stage=None)


def _declare_lost() -> None:
    now = timezone.now()
    expired = WorkerProcess.objects.filter(lease_expires_at__lt=now, lost_at=None, stopped_at=None)
    for worker in expired:
        with transaction.atomic():
            if expired.filter(id=worker.id).update(lost_at=now):
                metering.count(metrics.WORKERS_LOST, {"stage": worker.stage})


def _take_back_from_lost_workers() -> int:
    """Also from workers that stopped with something still in hand."""
    gone = Rollout.objects.filter(lease_owner__isnull=False).exclude(lease_owner__lost_at=None, lease_owner__stopped_at=None)
    taken = 0
    for rollout in gone.select_related("lease_owner", "run"):
        owner = rollout.lease_owner
        assert owner is not None  # noqa: S101 - filtered above
        stage = Stage(owner.stage)
        detail = f"worker process {owner.pid} on {owner.node} stopped renewing its lease"
        taken += _take_back(rollout, stage, Guard([STAGES[stage].holds_in], rollout.attempt, owner.id), detail)
    return taken


def _take_back_from_lost_nodes() -> int:
    """READY rollouts wait for a RUN worker of the node that has their sandbox; without one there they would wait for ever."""
    live = WorkerProcess.objects.filter(node=OuterRef("node"), stage=Stage.RUN.value, lost_at=None, stopped_at=None)
    # A RUN worker that is restarted comes back within a lease; only then is the sandbox given up.
    patience = timezone.now() - timedelta(seconds=settings.LEASE_SECONDS)
    waiting = Rollout.objects.filter(~Exists(live), state=State.READY.value, state_changed_at__lt=patience)
    taken = 0
    for rollout in waiting:
        guard = Guard([State.READY], rollout.attempt, unheld=True)
        reason = f"node {rollout.node} has no RUN worker any more"
        taken += hand_back(rollout_id=rollout.id, guard=guard, stage=Stage.RUN, reason=reason)
    return taken


def _take_back(rollout: Rollout, stage: Stage, guard: Guard, detail: str) -> bool:
    if rollout.cancel_requested_at is not None:
        return bool(finish_cancelled(ids=[rollout.id], guard=guard, phase=PHASES[stage], stage=stage))
    return give_up_lost(rollout=rollout, stage=stage, guard=guard, detail=detail)
