"""The lease of a worker process, which is the lease of all rollouts it holds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.utils import timezone

from rollouts.engine.errors import Failure
from rollouts.lifecycle import PHASES, STAGES, Cause, Stage, Termination
from rollouts.models import Rollout, WorkerProcess
from rollouts.run_settings import RunSettings

from .finish import give_up_attempt
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
    detail = "the worker process lost track of it"
    for rollout_id, attempt in rollouts:
        settings_of_run = Rollout.objects.values_list("run__settings", flat=True).get(id=rollout_id)
        give_up_attempt(
            rollout_id=rollout_id,
            guard=Guard([STAGES[stage].holds_in], attempt, worker_id),
            failure=Failure(Termination(PHASES[stage], Cause.WORKER_LOST, detail), retryable=True, traceback=""),
            stage=stage,
            max_retries=RunSettings.model_validate(settings_of_run).max_infra_retries,
            only_eval=stage is Stage.EVAL,
        )
