"""The lease of a worker process, which is the lease of all rollouts it holds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.utils import timezone

from rollouts.lifecycle import STAGES, Stage
from rollouts.models import Rollout, WorkerProcess

from .finish import give_up_lost
from .transition import Guard


class Heartbeat(NamedTuple):
    """What a worker process learns when it renews. `held` maps each rollout it still holds to whether its cancel was asked."""

    alive: bool
    held: dict[tuple[UUID, int], bool]


def register_worker(*, node: str, stage: Stage, pid: int, concurrency: int) -> UUID:
    """A worker process starts."""
    expires = timezone.now() + timedelta(seconds=settings.LEASE_SECONDS)
    worker = WorkerProcess.objects.create(
        node=node, stage=stage.value, pid=pid, concurrency=concurrency, lease_expires_at=expires
    )
    return worker.id


def renew(*, worker_id: UUID) -> Heartbeat:
    """Renew the lease. A worker that was declared lost learns it here, and that it holds nothing."""
    expires = timezone.now() + timedelta(seconds=settings.LEASE_SECONDS)
    alive = WorkerProcess.objects.filter(id=worker_id, lost_at=None, stopped_at=None).update(lease_expires_at=expires)
    if not alive:
        return Heartbeat(alive=False, held={})
    rows = Rollout.objects.filter(lease_owner_id=worker_id).values_list("id", "attempt", "cancel_requested_at")
    return Heartbeat(alive=True, held={(id_, attempt): asked is not None for id_, attempt, asked in rows})


def deregister_worker(*, worker_id: UUID) -> None:
    """A worker process ends in good order, having handed back what it held."""
    WorkerProcess.objects.filter(id=worker_id, stopped_at=None).update(stopped_at=timezone.now())


def give_back_forgotten(*, worker_id: UUID, stage: Stage, rollouts: Sequence[tuple[UUID, int]]) -> None:
    """A live worker holds these in the database but knows nothing of them: an answer of ours never reached it."""
    known = Rollout.objects.select_related("run").in_bulk([rollout_id for rollout_id, _ in rollouts])
    for rollout_id, attempt in rollouts:
        guard = Guard([STAGES[stage].holds_in], attempt, worker_id)
        give_up_lost(rollout=known[rollout_id], stage=stage, guard=guard, detail="the worker process lost track of it")
