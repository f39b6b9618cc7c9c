"""A rollout ends, or an attempt is given up and the rollout goes back to the queue."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from rollouts.engine.errors import Failure
from rollouts.engine.records import RunOutcome
from rollouts.environments.base import RewardComponent, Score
from rollouts.lifecycle import (
    PHASES,
    STAGES,
    Blame,
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
from .storable import storable_json, storable_text
from .transition import AttemptEnd, Guard, Move, move, move_each

# A lost attempt is repeated after about this long, doubling with every loss, so that a sick node or server is not hammered.
_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 60.0

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
        masked = termination.cause is Cause.AGENT_TIMEOUT and claim.settings.on_agent_timeout is not OnAgentTimeout.SCORE
        values = {
            "reward": score.total,
            "trainable": termination.blame is Blame.POLICY and not masked and score.total is not None,
        }
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
            "reward": reward,
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
    """A stage failed. Infrastructure failures are repeated up to `max_infra_retries`, without counting against the policy."""
    give_up_attempt(
        rollout_id=claim.rollout_id,
        guard=claim.guard,
        failure=failure,
        stage=claim.stage,
        max_retries=claim.settings.max_infra_retries,
        # The artefacts of RUN are stored, so only a sandbox that scoring needed makes RUN worth repeating.
        only_eval=claim.stage is Stage.EVAL and failure.termination.cause is not Cause.SANDBOX_ERROR,
    )


def give_up_attempt(
    *, rollout_id: UUID, guard: Guard, failure: Failure, stage: Stage, max_retries: int, only_eval: bool = False
) -> bool:
    """Give up what a worker held: repeat it after a backoff, or end the rollout once that has happened too often.

    `only_eval` repeats the evaluation alone, in the same attempt. False when `guard` does not hold (any more).
    """
    retries = Rollout.objects.values_list("infra_retries", flat=True).get(id=rollout_id)
    again = failure.retryable and retries < max_retries
    cause = failure.termination.cause
    data = {"cause": cause.value, "detail": storable_text(failure.termination.detail), "stage": stage.value}
    if again and only_eval:
        values = _retry_values(retries)
        return bool(move([rollout_id], to=State.EVALUATING, guard=guard, kind=EventKind.RELEASED, values=values, data=data))
    end = AttemptEnd(stage, failure.termination.detail, failure.traceback)
    if again:
        values = {**_retry_values(retries), "node": "", **_NO_TERMINATION}
        to, kind = State.QUEUED, EventKind.REQUEUED
    else:
        values = {**termination_values(failure.termination), "reward": None, "trainable": False}
        to, kind = final_state(failure.termination), EventKind.TRANSITION
    return bool(move([rollout_id], to=to, guard=guard, kind=kind, values=values, data=data, end=end))


def give_up_lost(*, rollout: Rollout, stage: Stage, guard: Guard, detail: str) -> bool:
    """Nobody works on a held rollout any more. What RUN stored is kept: of EVAL only the evaluation is repeated."""
    return give_up_attempt(
        rollout_id=rollout.id,
        guard=guard,
        failure=Failure(Termination(PHASES[stage], Cause.WORKER_LOST, detail), retryable=True, traceback=""),
        stage=stage,
        max_retries=RunSettings.model_validate(rollout.run.settings).max_infra_retries,
        only_eval=stage is Stage.EVAL,
    )


def _retry_values(retries: int) -> dict[str, Any]:
    backoff = min(_FIRST_BACKOFF_SECONDS * 2**retries, _LONGEST_BACKOFF_SECONDS) * random.uniform(0.75, 1.25)  # noqa: S311
    return {"infra_retries": retries + 1, "not_before": timezone.now() + timedelta(seconds=backoff)}


def hand_back(*, rollout_id: UUID, guard: Guard, stage: Stage, reason: str) -> bool:
    """Nothing failed, but the worker stops or the node has none for it: back at once, and no retry is counted.

    EVAL only gives up its lease. False when `guard` does not hold (any more).
    """
    data = {"reason": reason, "stage": stage.value}
    if stage is Stage.EVAL:
        return bool(move([rollout_id], to=State.EVALUATING, guard=guard, kind=EventKind.RELEASED, data=data))
    values = {"node": "", **_NO_TERMINATION}
    end = AttemptEnd(stage, reason)
    return bool(move([rollout_id], to=State.QUEUED, guard=guard, kind=EventKind.REQUEUED, values=values, data=data, end=end))


def finish_cancelled(*, ids: Collection[UUID], guard: Guard, phase: Phase | None, stage: Stage | None) -> int:
    """End rollouts that someone cancelled. With `phase` None it is derived from each rollout's state."""
    phases = {State.QUEUED: Phase.QUEUE, State.INITIALIZING: Phase.INIT, State.READY: Phase.RUN, State.RUNNING: Phase.RUN}
    done = 0
    for state in guard.states:
        termination = Termination(phase or phases.get(state, Phase.EVAL), Cause.CANCELLED)
        only = Guard(states=[state], attempt=guard.attempt, owner=guard.owner, unheld=guard.unheld)
        values = {**termination_values(termination), "reward": None, "trainable": False}
        data = {"cause": Cause.CANCELLED.value}
        done += len(move(list(ids), to=State.CANCELLED, guard=only, values=values, data=data, end=AttemptEnd(stage)))
    return done


_NO_TERMINATION = {"termination_phase": "", "termination_cause": "", "termination_blame": "", "termination_detail": ""}


def termination_values(termination: Termination) -> dict[str, Any]:
    return {
        "termination_phase": termination.phase.value,
        "termination_cause": termination.cause.value,
        "termination_blame": termination.blame.value,
        "termination_detail": storable_text(termination.detail),
    }
