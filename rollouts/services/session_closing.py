"""How a session ends by the word of whoever runs its agent: with a reward, with artefacts to be scored, or with neither."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import Count, Max, Q

from rollouts.engine.errors import EvaluationFailed, Failure
from rollouts.engine.records import RunOutcome
from rollouts.engine.scores import check_score
from rollouts.environments import registry
from rollouts.environments.base import ANSWER, RewardComponent, Score
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment
from rollouts.environments.external import EXTERNAL
from rollouts.lifecycle import Cause, Phase, Stage, State, Termination, final_state
from rollouts.llm.segment_ids import badge
from rollouts.llm.toolcalls import parse_reply
from rollouts.models import ModelCall, Rollout, Session
from rollouts.run_settings import RunSettings

from . import blobs
from .errors import Refused
from .finish import RewardVersion, add_reward_versions, finish_cancelled, give_up_attempt, termination_values
from .sessions import ended
from .storable import storable_json
from .transition import AttemptEnd, Guard, move

REWARD = "reward"  # the component's name where only a number is given


class Outcome(enum.StrEnum):
    """How the agent ended, in the words of whoever runs it."""

    COMPLETED = "completed"  # by itself; how well it did is the reward's to say
    MAX_TURNS = "max_turns"  # it was stopped after so many turns
    FAILED = "failed"  # it could not go on, for no fault of the policy's
    ABANDONED = "abandoned"  # nobody wants it any more


_CAUSES = {
    Outcome.COMPLETED: Cause.COMPLETED,
    Outcome.MAX_TURNS: Cause.MAX_TURNS,
    Outcome.FAILED: Cause.AGENT_FAILED,
    Outcome.ABANDONED: Cause.CANCELLED,
}
_SCORED = (Outcome.COMPLETED, Outcome.MAX_TURNS)


def give_reward(*, session: Session, components: Sequence[RewardComponent]) -> None:
    """Say what the session is worth, before it is closed. Said again, it replaces what was said before."""
    score = _checked(components)
    stored = [{"name": c.name, "value": c.value, "weight": c.weight, "detail": dict(c.detail)} for c in score.components]
    with transaction.atomic():
        rollout = _locked(session)
        if rollout.state != State.RUNNING.value:
            raise ended(rollout)
        Session.objects.filter(pk=session.pk).update(reward=storable_json(stored))


def close_session(
    *,
    session: Session,
    outcome: Outcome,
    components: Sequence[RewardComponent] | None = None,
    artefacts: Mapping[str, Any] | None = None,
    detail: str = "",
) -> Rollout:
    """End a session.

    The reward is what is given here, or was before. Without one the environment scores the artefacts where it can do that
    without a sandbox, and else the reward is null. What failed or was abandoned has none. Saying the same again is harmless.
    """
    if components is not None and outcome not in _SCORED:
        raise Refused.field("/reward", f"A session that {outcome.value} has no reward. Leave it out, or say another outcome.")
    given = None if components is None else _checked(components)
    with transaction.atomic():
        rollout = _locked(session)
        if _is_repeated(rollout, outcome, given):
            return rollout
        if rollout.state != State.RUNNING.value:
            raise ended(rollout)
        termination = Termination(Phase.RUN, _CAUSES[outcome], detail)
        _keep(rollout, termination, dict(artefacts or {}))
        if outcome is Outcome.ABANDONED:
            guard = Guard([State.RUNNING], rollout.attempt)
            finish_cancelled(ids=[rollout.id], guard=guard, phase=Phase.RUN, stage=Stage.RUN)
        elif outcome is Outcome.FAILED:
            give_up_session(rollout, termination)
        else:
            _hand_to_evaluation(rollout, termination)
            score = given or _given_before(rollout.session)
            if score is not None or not _can_be_evaluated(rollout):
                _finish(rollout, termination, score)
    rollout.refresh_from_db()
    return rollout


def give_up_session(rollout: Rollout, termination: Termination) -> None:
    """End one without a reward: nobody is there who could repeat it."""
    give_up_attempt(
        rollout_id=rollout.id,
        guard=Guard([State.RUNNING], rollout.attempt),
        failure=Failure(termination, retryable=False, traceback=""),
        stage=Stage.RUN,
        settings=RunSettings.model_validate(rollout.run.settings),
    )


def _locked(session: Session) -> Rollout:
    """Its rollout, which nobody moves until the transaction ends."""
    rollouts = Rollout.objects.select_for_update(of=("self",)).select_related("environment", "run", "session")
    return rollouts.get(pk=session.pk)


def _is_repeated(rollout: Rollout, outcome: Outcome, given: Score | None) -> bool:
    """Whether it was closed just so before: the answer may have been lost."""
    cause = _CAUSES[outcome].value
    return rollout.termination_cause == cause and (given is None or given.total == rollout.reward)


def _checked(components: Sequence[RewardComponent]) -> Score:
    try:
        return check_score(Score(list(components)))
    except EvaluationFailed as error:
        raise Refused.field("/reward", f"{error}.") from error


def _given_before(session: Session) -> Score | None:
    return Score([RewardComponent(**component) for component in session.reward]) if session.reward else None


def _keep(rollout: Rollout, termination: Termination, artefacts: dict[str, Any]) -> None:
    """What the agent leaves behind, and the badge of its trajectory, however it ended."""
    if ANSWER not in artefacts and (answer := _last_text(rollout)):
        artefacts[ANSWER] = answer
    calls = ModelCall.objects.filter(rollout=rollout, attempt=rollout.attempt).aggregate(
        segments=Count("segment", distinct=True), without_ids=Count("id", filter=Q(sampled_ids=b"")), last_at=Max("at")
    )
    fidelity = badge(calls["segments"], text_only=calls["without_ids"] > 0)
    outcome = RunOutcome(termination, storable_json(artefacts), fidelity)
    if blobs.artefacts_are_large(outcome):
        outcome = blobs.offload_artefacts(outcome)
    rollout.fidelity = outcome.fidelity.value
    # Its gateway process notes calls with its next heartbeat, which comes too late now.
    if calls["last_at"] is not None:
        Session.objects.filter(pk=rollout.pk).update(last_call_at=calls["last_at"])
    Rollout.objects.filter(pk=rollout.pk).update(
        artefacts=outcome.artefacts, artefacts_blob_id=outcome.artefacts_blob, fidelity=rollout.fidelity
    )


def _last_text(rollout: Rollout) -> str:
    calls = ModelCall.objects.filter(rollout=rollout, attempt=rollout.attempt).order_by("-turn")
    text = calls.values_list("text", flat=True).first()
    return parse_reply(text, {}).content if text else ""


def _can_be_evaluated(rollout: Rollout) -> bool:
    if rollout.environment.handler == EXTERNAL:
        return False
    try:
        return not registry.get(rollout.environment.handler).evaluates_in_sandbox
    except (UnknownEnvironment, BrokenEnvironment):
        return True  # not on this host; EVAL workers may have it, and say so if not


def _hand_to_evaluation(rollout: Rollout, termination: Termination) -> None:
    move(
        [rollout.id],
        to=State.EVALUATING,
        guard=Guard([State.RUNNING], rollout.attempt),
        values=termination_values(termination),
        data={"cause": termination.cause.value},
    )


def _finish(rollout: Rollout, termination: Termination, score: Score | None) -> None:
    """A session in which no model was called has nothing to train on, whatever it is worth."""
    total = score.total if score else None
    settings = RunSettings.model_validate(rollout.run.settings)
    trainable = rollout.turns > 0 and settings.lets_into_batch(termination.cause, total, rollout.fidelity)
    move(
        [rollout.id],
        to=final_state(termination),
        guard=Guard([State.EVALUATING], rollout.attempt, unheld=True),
        values={"reward": total, "reward_version": int(score is not None), "trainable": trainable},
        data={"reward": total},
        end=AttemptEnd(Stage.RUN),
    )
    if score is not None:
        add_reward_versions([RewardVersion(rollout.id, 1, score)])
