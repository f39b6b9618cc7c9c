"""The rescuer: takes back what lost worker processes held, what waits on nodes that are gone, and what is stuck."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import timedelta

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection, transaction
from django.db.models import Exists, F, OuterRef, Q
from django.db.models.functions import Now

from rollouts import metrics
from rollouts.engine.errors import stuck
from rollouts.lifecycle import GATEWAY, PHASES, STAGES, WAITING, EventKind, Stage, State
from rollouts.models import Node, Rollout, WorkerProcess
from rollouts.run_settings import RunSettings

from . import metering
from .finish import finish_cancelled, give_up_attempt, give_up_lost, hand_back
from .session_holding import end_if_silent, silent_sessions
from .transition import Guard

logger = logging.getLogger(__name__)


def reap() -> int:
    """One pass; how many rollouts were taken back or ended. Safe to run at any time and more than once."""
    taken = 0
    if _is_a_fair_judge():
        _declare_lost()
        taken = _count(end_if_silent, silent_sessions())
    _end_cancelled()
    _note_stuck()
    taken += _take_back_from_lost_workers() + _take_back_stuck()
    return taken + _take_back_from_draining_nodes() + _take_back_from_lost_nodes()


_JUDGE = """
INSERT INTO rollouts_rescuerpass AS last (id, at, grace_until) VALUES (true, now(), now())
ON CONFLICT (id) DO UPDATE SET at = now(), grace_until =
    CASE WHEN last.at < GREATEST(now() - make_interval(secs => %(lease)s), pg_postmaster_start_time())
    THEN now() + make_interval(secs => %(lease)s) ELSE last.grace_until END
RETURNING grace_until <= now()
"""


def _is_a_fair_judge() -> bool:
    """Whether an expired lease says something about the worker.

    It does not when this rescuer was away for longer than a lease, or the database was restarted: what kept us from working may
    have kept the workers from renewing. Then everybody has one lease's time to come back.
    """
    with connection.cursor() as cursor:
        cursor.execute(_JUDGE, {"lease": settings.LEASE_SECONDS})
        return bool(cursor.fetchone()[0])


def _declare_lost() -> None:
    expired = WorkerProcess.objects.filter(lease_expires_at__lt=Now(), lost_at=None, stopped_at=None)
    for worker in expired:
        with transaction.atomic():
            if expired.filter(id=worker.id).update(lost_at=Now()):
                metering.count(metrics.WORKERS_LOST, {"stage": worker.stage})


def _end_cancelled() -> None:
    """Handed on in the moment between the asking and the worker's next heartbeat, or held by a worker that does not react."""
    asked = Rollout.objects.filter(cancel_requested_at__isnull=False, finished_at=None)
    if waiting := list(asked.filter(lease_owner=None).values_list("id", flat=True)):
        finish_cancelled(ids=waiting, guard=Guard(WAITING, unheld=True), phase=None, stage=None)
    patience = Now() - timedelta(seconds=settings.LEASE_SECONDS)
    if held := list(asked.filter(cancel_requested_at__lt=patience).values_list("id", flat=True)):
        finish_cancelled(ids=held, guard=Guard([rule.holds_in for rule in STAGES.values()]), phase=None, stage=None)


def _take_back_from_lost_workers() -> int:
    """Also from workers that stopped with something still in hand. Sessions wait for another gateway process."""
    held = Rollout.objects.filter(lease_owner__isnull=False).exclude(lease_owner__stage=GATEWAY)
    gone = held.exclude(lease_owner__lost_at=None, lease_owner__stopped_at=None)
    return _count(_take_back_lost, gone.select_related("lease_owner", "run").defer("artefacts"))


def _take_back_lost(rollout: Rollout) -> int:
    owner = rollout.lease_owner
    assert owner is not None  # noqa: S101 - filtered by the caller
    stage = Stage(owner.stage)
    guard = Guard([STAGES[stage].holds_in], rollout.attempt, owner.id)
    if rollout.cancel_requested_at is not None:
        return finish_cancelled(ids=[rollout.id], guard=guard, phase=PHASES[stage], stage=stage)
    detail = f"worker process {owner.pid} on {owner.node} stopped renewing its lease"
    return give_up_lost(rollout=rollout, stage=stage, guard=guard, detail=detail)


def _count(take_back: Callable[[Rollout], int], rollouts: Iterable[Rollout]) -> int:
    """How many were taken back. One that cannot be must not keep the rescuer from the others."""
    taken = 0
    for rollout in rollouts:
        try:
            taken += take_back(rollout)
        except (OperationalError, InterfaceError):
            raise  # it is not this one's
        except Exception:
            logger.exception("rollout %s cannot be taken back; trying again", rollout.id)
    return taken


# --- READY rollouts whose node will not run them --------------------------------------------------------------------------


def _take_back_from_draining_nodes() -> int:
    """The node starts nothing any more; what its workers hold is their own to finish."""
    draining = Node.objects.filter(name=OuterRef("node"), draining_since__isnull=False)
    return sum(
        _hand_back_ready(rollout, f"node {rollout.node} drains")
        for rollout in Rollout.objects.filter(Exists(draining), state=State.READY.value).only("id", "attempt", "node")
    )


def _take_back_from_lost_nodes() -> int:
    """READY rollouts wait for a RUN worker of the node that has their sandbox; without one there they would wait for ever."""
    live = WorkerProcess.objects.filter(node=OuterRef("node"), stage=Stage.RUN.value, lost_at=None, stopped_at=None)
    # A RUN worker that is restarted comes back within a lease; only then is the sandbox given up.
    patience = Now() - timedelta(seconds=settings.LEASE_SECONDS)
    waiting = Rollout.objects.filter(~Exists(live), state=State.READY.value, state_changed_at__lt=patience)
    return sum(
        _hand_back_ready(rollout, f"node {rollout.node} has no RUN worker any more")
        for rollout in waiting.only("id", "attempt", "node")
    )


def _hand_back_ready(rollout: Rollout, reason: str) -> bool:
    guard = Guard([State.READY], rollout.attempt, unheld=True)
    return hand_back(rollout_id=rollout.id, guard=guard, stage=Stage.RUN, reason=reason)


# --- Stuck ------------------------------------------------------------------------------------------------------------------

# The worker's own deadline comes first. One lease later its rollout is called stuck and the worker asked, with its next
# heartbeat, to give it up; another lease later it is taken away. EVAL may have to initialise a sandbox again
# before its own time begins.
_NOTE_STUCK = """
WITH stuck AS (
    UPDATE rollouts_rollout r SET stuck_at = now() FROM rollouts_run run, rollouts_workerprocess holder
    WHERE run.id = r.run_id AND holder.id = r.lease_owner_id AND holder.stage <> 'gateway' AND r.cancel_requested_at IS NULL
      AND (r.stuck_at IS NULL OR r.stuck_at < r.state_changed_at)
      AND r.state_changed_at < now() - make_interval(secs => %(margin)s)
      AND r.state_changed_at < now() - make_interval(secs => %(margin)s
          + (run.settings -> 'timeouts' ->>
             CASE r.state WHEN 'initializing' THEN 'init' WHEN 'running' THEN 'agent' ELSE 'eval' END)::float
          + CASE r.state WHEN 'evaluating' THEN (run.settings -> 'timeouts' ->> 'init')::float ELSE 0 END)
    RETURNING r.id, r.attempt, r.state, r.lease_owner_id, EXTRACT(EPOCH FROM now() - r.state_changed_at) AS seconds
)
INSERT INTO rollouts_rolloutevent (rollout_id, attempt, at, kind, from_state, to_state, data)
SELECT id, attempt, now(), %(kind)s, state, state, jsonb_build_object('worker', lease_owner_id, 'held_seconds', round(seconds))
FROM stuck
"""


def _note_stuck() -> None:
    """Held far past the stage's deadline, though the worker renews its lease: once for every claim."""
    with connection.cursor() as cursor:
        cursor.execute(_NOTE_STUCK, {"margin": settings.LEASE_SECONDS, "kind": EventKind.STUCK.value})


def _take_back_stuck() -> int:
    patience = Now() - timedelta(seconds=settings.LEASE_SECONDS)
    held = Rollout.objects.filter(Q(stuck_at__gt=F("state_changed_at")), lease_owner__isnull=False, stuck_at__lt=patience)
    return _count(_take_back_one_stuck, held.select_related("lease_owner", "run").defer("artefacts"))


def _take_back_one_stuck(rollout: Rollout) -> bool:
    assert rollout.lease_owner is not None  # noqa: S101 - filtered by the caller
    stage = Stage(rollout.lease_owner.stage)
    return give_up_attempt(
        rollout_id=rollout.id,
        guard=Guard([STAGES[stage].holds_in], rollout.attempt, rollout.lease_owner_id),
        failure=stuck(PHASES[stage]),
        stage=stage,
        settings=RunSettings.model_validate(rollout.run.settings),
    )
