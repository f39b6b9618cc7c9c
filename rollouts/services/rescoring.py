"""Scoring finished rollouts again: what an EVAL worker takes, and what becomes of it. Every write is guarded by who has it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from rollouts.engine.errors import Failure
from rollouts.engine.retries import GiveUp, decide
from rollouts.environments.base import Score
from rollouts.lifecycle import (
    Cause,
    EventKind,
    Phase,
    RescoringState,
    Stage,
    Termination,
    final_state,
)
from rollouts.models import Rescoring
from rollouts.run_settings import RunSettings

from .finish import RewardVersion, add_reward_versions, termination_values
from .storable import storable_text
from .tallies import restart_tally


@dataclass(frozen=True)
class RescoringClaim:
    """A rescoring in the hands of one worker process, and all that it takes. `tries` fences writes of an earlier one."""

    rescoring_id: int
    tries: int
    failures: int
    owner: UUID
    rollout_id: UUID
    attempt: int
    handler: str
    config: dict[str, Any]
    payload: dict[str, Any]
    settings: RunSettings
    artefacts: dict[str, Any]
    artefacts_blob: str | None
    ended_in_run: Termination
    sandbox_name: str
    fidelity: str  # the badge of its trajectory


def claim_rescorings(*, owner: UUID, working_on: Collection[int], limit: int) -> list[RescoringClaim]:
    """Take up to `limit` waiting rescorings, oldest first.

    The worker process names what it is working on: what it has beyond that was taken by a claim whose answer never came.
    """
    now = timezone.now()
    Rescoring.objects.filter(owner_id=owner, state=RescoringState.RUNNING.value).exclude(id__in=working_on).update(
        state=RescoringState.QUEUED.value, owner=None
    )
    due = Rescoring.objects.filter(Q(not_before=None) | Q(not_before__lte=now), state=RescoringState.QUEUED.value)
    with transaction.atomic():
        taken = list(
            due.order_by("id")
            .select_for_update(skip_locked=True, of=("self",))
            .select_related("environment", "rollout__task", "rollout__run")[:limit]
        )
        for rescoring in taken:
            rescoring.state, rescoring.owner_id, rescoring.tries = RescoringState.RUNNING.value, owner, rescoring.tries + 1
            rescoring.sandbox_name = f"prorl-rescoring-{rescoring.pk}-{rescoring.tries}"
        Rescoring.objects.bulk_update(taken, ["state", "owner", "tries", "sandbox_name"])
    return [_claim(rescoring, owner) for rescoring in taken]


def _claim(rescoring: Rescoring, owner: UUID) -> RescoringClaim:
    rollout = rescoring.rollout
    eval_failed = rollout.termination_phase == Phase.EVAL.value
    cause, detail = (
        (rollout.run_cause, rollout.run_detail) if eval_failed else (rollout.termination_cause, rollout.termination_detail)
    )
    return RescoringClaim(
        rescoring_id=rescoring.pk,
        tries=rescoring.tries,
        failures=rescoring.failures,
        owner=owner,
        rollout_id=rollout.id,
        attempt=rollout.attempt,
        handler=rescoring.environment.handler,
        config=rescoring.environment.config,
        payload=rollout.task.payload,
        settings=RunSettings.model_validate(rollout.run.settings),
        artefacts=rollout.artefacts,
        artefacts_blob=rollout.artefacts_blob_id,
        ended_in_run=Termination(Phase.RUN, Cause(cause), detail),
        sandbox_name=rescoring.sandbox_name,
        fidelity=rollout.fidelity,
    )


# Both guards in one statement: the rescoring is still this worker's, and the rollout is in the attempt that was scored.
_FINISH = """
WITH held AS (
    SELECT id, rollout_id FROM rollouts_rescoring
    WHERE id = %(rescoring)s AND state = 'running' AND owner_id = %(owner)s AND tries = %(tries)s FOR UPDATE
), old AS (
    SELECT r.id, r.state, r.reward FROM rollouts_rollout r JOIN held ON held.rollout_id = r.id
    WHERE r.attempt = %(attempt)s AND r.finished_at IS NOT NULL FOR UPDATE OF r
), scored AS (
    UPDATE rollouts_rollout r SET {assignments}, reward_version = r.reward_version + 1, state_changed_at = now()
    FROM old WHERE r.id = old.id RETURNING r.id, r.attempt, r.reward_version, old.state AS before, old.reward AS reward_before
), noted AS (
    INSERT INTO rollouts_rolloutevent (rollout_id, attempt, at, kind, from_state, to_state, data)
    SELECT id, attempt, now(), '{kind}', before, %(state)s,
           jsonb_build_object('rescoring', %(rescoring)s::bigint, 'reward_version', reward_version,
                              'reward', %(reward)s::float8, 'reward_before', reward_before)
    FROM scored
), done AS (
    UPDATE rollouts_rescoring SET state = 'done', owner_id = NULL, finished_at = now(), cause = '', detail = '', traceback = '',
        reward = %(reward)s, reward_before = scored.reward_before, reward_version = scored.reward_version
    FROM scored WHERE rollouts_rescoring.id = %(rescoring)s
)
SELECT reward_version FROM scored
"""


def finish_rescoring(*, claim: RescoringClaim, score: Score) -> bool:
    """The next reward version; a rollout whose EVAL had failed now ends as its RUN did. False when the claim is not current."""
    reward = score.total
    values: dict[str, Any] = {
        "state": final_state(claim.ended_in_run).value,
        "reward": reward,
        "trainable": claim.settings.lets_into_batch(claim.ended_in_run.cause, reward, claim.fidelity),
        **termination_values(claim.ended_in_run),
    }
    statement = _FINISH.format(
        assignments=", ".join(f"{column} = %({column})s" for column in values), kind=EventKind.RESCORED.value
    )
    guard: dict[str, Any] = {
        "rescoring": claim.rescoring_id,
        "owner": claim.owner,
        "tries": claim.tries,
        "attempt": claim.attempt,
    }
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(statement, values | guard)
            row = cursor.fetchone()
        if row is None:
            return False
        add_reward_versions([RewardVersion(claim.rollout_id, row[0], score)])
        restart_tally(rollout_id=claim.rollout_id)
    return True


def fail_rescoring(*, claim: RescoringClaim, failure: Failure) -> bool:
    """Scoring failed: nothing about the rollout changes. Repeated like an EVAL; False when the claim is not current."""
    held = Rescoring.objects.filter(
        id=claim.rescoring_id, owner_id=claim.owner, tries=claim.tries, state=RescoringState.RUNNING.value
    )
    return _give_up(held, claim.failures, claim.settings, failure)


def take_back_rescorings() -> int:
    """What stopped and lost worker processes had goes back to the queue; how many. Safe to run at any time."""
    running = Rescoring.objects.filter(state=RescoringState.RUNNING.value)
    taken = running.filter(owner__stopped_at__isnull=False).update(state=RescoringState.QUEUED.value, owner=None)
    for rescoring in running.filter(owner__lost_at__isnull=False).select_related("owner", "rollout__run"):
        owner = rescoring.owner
        assert owner is not None  # noqa: S101 - a constraint of the table
        detail = f"worker process {owner.pid} on {owner.node} was lost"
        failure = Failure(Termination(Phase.EVAL, Cause.WORKER_LOST, detail), retryable=True, traceback="")
        held = running.filter(id=rescoring.pk, owner=owner, tries=rescoring.tries)
        taken += _give_up(held, rescoring.failures, RunSettings.model_validate(rescoring.rollout.run.settings), failure)
    return taken


def _give_up(held: QuerySet[Rescoring], failures: int, settings: RunSettings, failure: Failure) -> bool:
    now = timezone.now()
    decision = decide(settings, Stage.EVAL, failure, {Stage.EVAL: failures})
    if isinstance(decision, GiveUp):
        outcome: dict[str, Any] = {"state": RescoringState.FAILED.value, "finished_at": now}
    else:
        outcome = {"state": RescoringState.QUEUED.value, "not_before": now + timedelta(seconds=decision.after_seconds)}
    return bool(
        held.update(
            owner=None,
            failures=failures + 1,
            cause=failure.termination.cause.value,
            detail=storable_text(failure.termination.detail),
            traceback=storable_text(failure.traceback),
            **outcome,
        )
    )
