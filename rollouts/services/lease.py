"""The lease of a worker process, which is the lease of all rollouts it holds. Only the database's clock counts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import connection, transaction
from django.db.models.functions import Coalesce, Now

from rollouts.lifecycle import STAGES, Stage
from rollouts.models import Draining, Rollout, WorkerProcess

from .finish import give_up_lost
from .nodes import register_node
from .transition import Guard


class Holding(NamedTuple):
    """What the holder of a rollout is asked to do with it."""

    cancel_asked: bool = False
    stuck: bool = False  # far past its stage's deadline: give it up


class Heartbeat(NamedTuple):
    """What a worker process learns when it renews: what it still holds, and whether its node drains."""

    alive: bool
    held: dict[tuple[UUID, int], Holding]
    draining: Draining = Draining.NO


def register_worker(*, node: str, stage: str, pid: int, concurrency: int) -> UUID:
    """A worker process of a stage starts, or one of the gateway (`GATEWAY`)."""
    with transaction.atomic():
        register_node(node)
        expires = Now() + timedelta(seconds=settings.LEASE_SECONDS)
        return WorkerProcess.objects.create(
            node=node, stage=str(stage), pid=pid, concurrency=concurrency, lease_expires_at=expires
        ).id


# The node's row is shared by its processes, so not each of them writes it in each heartbeat.
_RENEW = """
WITH beat AS (
    UPDATE rollouts_workerprocess SET lease_expires_at = now() + make_interval(secs => %s)
    WHERE id = %s AND lost_at IS NULL AND stopped_at IS NULL RETURNING node
), seen AS (
    UPDATE rollouts_node n SET last_seen_at = now()
    FROM beat WHERE n.name = beat.node AND n.last_seen_at < now() - interval '1 second'
)
SELECT n.drain_deadline IS NOT NULL, n.drain_deadline <= now() FROM beat LEFT JOIN rollouts_node n ON n.name = beat.node
"""
_HELD = """
SELECT id, attempt, cancel_requested_at IS NOT NULL, stuck_at IS NOT NULL AND stuck_at > state_changed_at
FROM rollouts_rollout WHERE lease_owner_id = %s
"""


def renew(*, worker_id: UUID) -> Heartbeat:
    """Renew the lease. A worker that was declared lost learns it here, and that it holds nothing."""
    with connection.cursor() as cursor:
        cursor.execute(_RENEW, [settings.LEASE_SECONDS, worker_id])
        row = cursor.fetchone()
        if row is None:
            return Heartbeat(alive=False, held={})
        drains, over = row
        cursor.execute(_HELD, [worker_id])
        held = {(id_, attempt): Holding(asked, stuck) for id_, attempt, asked, stuck in cursor.fetchall()}
    return Heartbeat(True, held, Draining.OVER if over else Draining.FINISHING if drains else Draining.NO)


def announce_drain(*, worker_id: UUID) -> None:
    """A worker process takes nothing new any more, so that the dispatcher does not count on it."""
    WorkerProcess.objects.filter(id=worker_id).update(draining_since=Coalesce("draining_since", Now()))


def deregister_worker(*, worker_id: UUID) -> None:
    """A worker process ends in good order, having handed back what it held."""
    WorkerProcess.objects.filter(id=worker_id, stopped_at=None).update(stopped_at=Now())


def give_back_forgotten(*, worker_id: UUID, stage: Stage, rollouts: Sequence[tuple[UUID, int]]) -> None:
    """A live worker holds these in the database but knows nothing of them: an answer of ours never reached it."""
    known = Rollout.objects.select_related("run").in_bulk([rollout_id for rollout_id, _ in rollouts])
    for rollout_id, attempt in rollouts:
        guard = Guard([STAGES[stage].holds_in], attempt, worker_id)
        give_up_lost(rollout=known[rollout_id], stage=stage, guard=guard, detail="the worker process lost track of it")
