"""A rollout ends, or an attempt is given up and the rollout goes back to the queue."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connection, transaction

from rollouts.engine.errors import Failure
from rollouts.engine.records import RunOutcome
from rollouts.engine.retries import GiveUp, Retry, decide
from rollouts.environments import registry
from rollouts.environments.base import RestoresSandbox, RewardComponent, Score
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment
from rollouts.lifecycle import (
    PHASES,
    STAGES,
    AfterFailure,
    Cause,
    EventKind,
    OnAgentTimeout,
    Phase,
    Stage,
    State,
    Termination,
    final_state,
)
from rollouts.models import Reward, Rollout
from rollouts.run_settings import RunSettings

from .claim import Claim
from .history import note_failure, retries_by_stage
from .storable import storable_json, storable_text
from .transition import AttemptEnd, Guard, Move, move, move_each

# Written when an agent's time ran out and its run says `on_agent_timeout: zero`.
_TIMEOUT_ZERO = Score([RewardComponent(name="agent_timeout", value=0.0)])


class Scored(NamedTuple):
    """EVAL is done."""

    claim: Claim
    score: Score


class Unscored(NamedTuple):
    """The agent's time ran out in a run that does not evaluate such rollouts."""

    claim: Claim
    outcome: RunOutcome


def finish_scored(done: Sequence[Scored]) -> list[bool]:
    """End evaluated rollouts. The termination was decided in RUN; False where the claim is not current any more."""
    moves: defaultdict[State, list[Move]] = defaultdict(list)
    for claim, score in done:
        termination = Termination(Phase.RUN, Cause(claim.termination_cause))
        trainable = claim.settings.lets_into_batch(termination.cause, score.total, claim.fidelity)
        values = {"reward": score.total, "reward_version": 1, "trainable": trainable}
        moves[final_state(termination)].append(claim.move(values=values, data={"reward": score.total}))
    return _end(moves, [(claim, score) for claim, score in done])


def finish_unscored(done: Sequence[Unscored]) -> list[bool]:
    """End rollouts whose run says what a timeout is worth: reward 0 (`zero`) or none (`drop`)."""
    moves: defaultdict[State, list[Move]] = defaultdict(list)
    scores = []
    for claim, outcome in done:
        zero = claim.settings.on_agent_timeout is OnAgentTimeout.ZERO
        reward = 0.0 if zero else None
        values = {
            **termination_values(outcome.termination),
            "fidelity": outcome.fidelity.value,
            "artefacts": storable_json(outcome.artefacts),
            "artefacts_blob_id": outcome.artefacts_blob,
            "reward": reward,
            "reward_version": int(zero),
            "trainable": zero,
        }
        moves[final_state(outcome.termination)].append(claim.move(values=values, data={"reward": reward}))
        scores.append((claim, _TIMEOUT_ZERO if zero else None))
    return _end(moves, scores)


def _end(moves: Mapping[State, Sequence[Move]], scores: Sequence[tuple[Claim, Score | None]]) -> list[bool]:
    """The moves and their rewards, in one transaction; which of the claims were current."""
    stage = scores[0][0].stage
    with transaction.atomic():
        moved = {
            m.id
            for state, own in moves.items()
            for m in move_each(own, to=state, states=[STAGES[stage].holds_in], end=AttemptEnd(stage))
        }
        current = [(claim.rollout_id, score) for claim, score in scores if claim.rollout_id in moved]
        add_reward_versions([RewardVersion(id_, 1, score) for id_, score in current if score is not None])
    return [claim.rollout_id in moved for claim, _ in scores]


class RewardVersion(NamedTuple):
    """One scoring of a rollout."""

    rollout_id: UUID
    version: int
    score: Score


def add_reward_versions(versions: Sequence[RewardVersion]) -> None:
    """Store the components of scores. Those of earlier versions stay."""
    Reward.objects.bulk_create(
        Reward(
            rollout_id=rollout_id,
            version=version,
            name=c.name,
            value=c.value,
            weight=c.weight,
            detail=storable_json(dict(c.detail)),
        )
        for rollout_id, version, score in versions
        for c in score.components
    )


def fail(*, claim: Claim, failure: Failure) -> None:
    """A stage failed. The infrastructure's failures are repeated as the run says, without counting against the policy."""
    give_up_attempt(
        rollout_id=claim.rollout_id,
        guard=claim.guard,
        failure=failure,
        stage=claim.stage,
        settings=claim.settings,
        restores=claim.stage is Stage.EVAL and _restores_sandbox(claim.handler),
    )


def _restores_sandbox(handler: str) -> bool:
    try:
        return isinstance(registry.get(handler), RestoresSandbox)
    except (UnknownEnvironment, BrokenEnvironment):
        return False


def give_up_attempt(
    *, rollout_id: UUID, guard: Guard, failure: Failure, stage: Stage, settings: RunSettings, restores: bool = False
) -> bool:
    """Give up what a worker held: repeat it after a backoff (EVAL alone, where RUN's results are stored), or end the rollout.

    `restores`: the environment can rebuild a sandbox that EVAL lost.
    False when `guard` does not hold (any more).
    """
    retries = retries_by_stage(rollout_id)
    decision = decide(settings, stage, failure, retries, restores=restores)
    data = {
        "cause": failure.termination.cause.value,
        "detail": storable_text(failure.termination.detail),
        "stage": stage.value,
    }
    kind, end = EventKind.TRANSITION, AttemptEnd(stage, failure.termination.detail, failure.traceback)
    match decision:
        case Retry(only_eval=True):
            to, kind, after = State.EVALUATING, EventKind.RELEASED, AfterFailure.EVAL_AGAIN
            values = _retry_values(decision, retries)
        case Retry():
            to, kind, after = State.QUEUED, EventKind.REQUEUED, AfterFailure.REQUEUED
            values = {**_retry_values(decision, retries), "node": "", **_NO_TERMINATION}
        case GiveUp():
            to, after = final_state(failure.termination), AfterFailure.GAVE_UP
            values = {**termination_values(failure.termination), "reward": None, "trainable": False}
            if stage is Stage.EVAL:
                values |= _how_run_ended(rollout_id)
            data["not_repeated"] = decision.reason
    with transaction.atomic():
        moved = move([rollout_id], to=to, guard=guard, kind=kind, values=values, data=data, end=end)
        for rollout in moved:
            note_failure(
                rollout_id=rollout.id, attempt=rollout.attempt, stage=stage, owner=guard.owner, failure=failure, after=after
            )
    return bool(moved)


def _how_run_ended(rollout_id: UUID) -> dict[str, str]:
    """Kept when the termination becomes that of a failed EVAL, for the day its artefacts are scored after all."""
    cause, detail = Rollout.objects.values_list("termination_cause", "termination_detail").get(id=rollout_id)
    return {"run_cause": cause, "run_detail": detail}


def give_up_lost(*, rollout: Rollout, stage: Stage, guard: Guard, detail: str) -> bool:
    """Nobody works on a held rollout any more."""
    return give_up_attempt(
        rollout_id=rollout.id,
        guard=guard,
        failure=Failure(Termination(PHASES[stage], Cause.WORKER_LOST, detail), retryable=True, traceback=""),
        stage=stage,
        settings=RunSettings.model_validate(rollout.run.settings),
    )


def _retry_values(retry: Retry, retries: Counter[Stage]) -> dict[str, Any]:
    pause = timedelta(seconds=retry.after_seconds * random.uniform(0.75, 1.25))  # noqa: S311
    return {"infra_retries": retries.total() + 1, "not_before": _database_time() + pause}


def _database_time() -> datetime:
    """The clock that ends waits: that of a worker's host may be minutes off."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        now: datetime = cursor.fetchone()[0]
    return now


class GivenBack(NamedTuple):
    """A claim that a worker cannot carry out, though nothing failed."""

    claim: Claim
    reason: str


def hand_back_claims(given: Sequence[GivenBack]) -> list[bool]:
    """Claims of one stage go back, as in `hand_back`. False where the claim is not current any more."""
    stage = given[0].claim.stage
    moved = set()
    for reason in {reason for _, reason in given}:
        moves = [claim.move(values={}) for claim, own in given if own == reason]
        moved |= _hand_back(moves, [STAGES[stage].holds_in], stage, reason)
    return [claim.rollout_id in moved for claim, _ in given]


def hand_back(*, rollout_id: UUID, guard: Guard, stage: Stage, reason: str) -> bool:
    """Nothing failed, but the worker stops or the node has none for it: back at once, and no retry is counted.

    EVAL only gives up its lease. False when `guard` does not hold (any more).
    """
    moves = [Move(rollout_id, guard.attempt, guard.owner)]
    return bool(_hand_back(moves, guard.states, stage, reason, unheld=guard.unheld))


def _hand_back(
    moves: Sequence[Move], states: Collection[State], stage: Stage, reason: str, *, unheld: bool = False
) -> set[UUID]:
    moves = [replace(m, data={"reason": reason, "stage": stage.value}) for m in moves]
    if stage is Stage.EVAL:
        moved = move_each(moves, to=State.EVALUATING, states=states, unheld=unheld, kind=EventKind.RELEASED)
    else:
        moved = move_each(
            moves,
            to=State.QUEUED,
            states=states,
            unheld=unheld,
            kind=EventKind.REQUEUED,
            values={"node": "", **_NO_TERMINATION},
            end=AttemptEnd(stage, reason),
        )
    return {m.id for m in moved}


def finish_cancelled(*, ids: Collection[UUID], guard: Guard, phase: Phase | None, stage: Stage | None) -> int:
    """End rollouts that someone cancelled, or a budget. With `phase` None it is derived from each rollout's state."""
    phases = {State.QUEUED: Phase.QUEUE, State.INITIALIZING: Phase.INIT, State.READY: Phase.RUN, State.RUNNING: Phase.RUN}
    asked = dict(Rollout.objects.filter(id__in=ids).exclude(cancel_cause="").values_list("id", "cancel_cause"))
    causes = {id_: asked.get(id_, Cause.CANCELLED.value) for id_ in ids}
    moves = [
        Move(id_, guard.attempt, guard.owner, values={"termination_cause": cause}, data={"cause": cause})
        for id_, cause in causes.items()
    ]
    done = 0
    for state in guard.states:
        termination = Termination(phase or phases.get(state, Phase.EVAL), Cause.CANCELLED)
        values = {**termination_values(termination), "reward": None, "trainable": False}
        del values["termination_cause"]  # each has its own
        end = AttemptEnd(stage)
        done += len(move_each(moves, to=State.CANCELLED, states=[state], unheld=guard.unheld, values=values, end=end))
    return done


_NO_TERMINATION = {"termination_phase": "", "termination_cause": "", "termination_blame": "", "termination_detail": ""}


def termination_values(termination: Termination) -> dict[str, Any]:
    return {
        "termination_phase": termination.phase.value,
        "termination_cause": termination.cause.value,
        "termination_blame": termination.blame.value,
        "termination_detail": storable_text(termination.detail),
    }
