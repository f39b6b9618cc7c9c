"""What a held rollout writes on its way: its turns, and the hand-over to the next stage."""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import IntegrityError, transaction
from django.db.models import F

from rollouts.engine.records import RunOutcome, TurnRecord
from rollouts.lifecycle import STAGES, Stage
from rollouts.models import Message, ModelCall, Rollout, ToolCall

from .claim import Claim
from .storable import storable_json, storable_text
from .transition import move


def record_turn(*, claim: Claim, record: TurnRecord) -> bool:
    """Store one turn in one transaction. False, and nothing is stored, when the claim is not current any more."""
    try:
        return _record_turn(claim, record)
    except IntegrityError:
        # Only the holder of this claim writes this attempt's turns, so the turn is there already: its first try was committed
        # though the answer was lost.
        return True


def _record_turn(claim: Claim, record: TurnRecord) -> bool:
    call = record.model_call
    with transaction.atomic():
        current = Rollout.objects.filter(
            id=claim.rollout_id, attempt=claim.attempt, lease_owner_id=claim.owner, state=STAGES[claim.stage].holds_in
        )
        if call is None:
            changed = current.update(turns=F("turns"))
        else:
            changed = current.update(
                turns=F("turns") + 1,
                prompt_tokens=F("prompt_tokens") + len(call.context_ids),
                sampled_tokens=F("sampled_tokens") + len(call.sampled_ids),
                policy_version=call.policy_version,
            )
        if not changed:
            return False
        _insert(claim, record)
    return True


def _insert(claim: Claim, record: TurnRecord) -> None:
    place = {"rollout_id": claim.rollout_id, "attempt": claim.attempt}
    if call := record.model_call:
        ModelCall.objects.create(
            **place,
            turn=call.turn,
            segment=call.segment,
            context_ids=call.context_ids,
            sampled_ids=call.sampled_ids,
            logprobs=call.logprobs,
            text=storable_text(call.text),
            finish_reason=call.finish_reason,
            prompt_tokens=call.prompt_tokens,
            policy=call.policy,
            policy_version=call.policy_version,
            server_id=call.server_id or None,
            sampling=call.sampling,
            latency=call.latency,
        )
    Message.objects.bulk_create(
        Message(**place, index=m.index, turn=m.turn, role=m.role, name=m.name, content=storable_text(m.content))
        for m in record.messages
    )
    ToolCall.objects.bulk_create(
        ToolCall(
            **place,
            turn=t.turn,
            index=t.index,
            name=storable_text(t.name)[:60],
            arguments=storable_json(t.arguments),
            raw=storable_text(t.raw),
            output=storable_text(t.output),
            exit_code=t.exit_code,
            timed_out=t.timed_out,
            truncated_bytes=t.truncated_bytes,
            error=storable_text(t.error),
            started_at=datetime.fromtimestamp(t.started_at, UTC),
            duration=t.duration,
        )
        for t in record.tool_calls
    )


def hand_over_ready(*, claim: Claim, sandbox_name: str) -> bool:
    """INIT is done. False when the claim is not current any more."""
    to = STAGES[Stage.INIT].hands_to
    return bool(move([claim.rollout_id], to=to, guard=claim.guard, values={"sandbox_name": sandbox_name}))


def hand_over_for_evaluation(*, claim: Claim, outcome: RunOutcome) -> bool:
    """RUN is done: store what evaluation needs before the sandbox goes. False when the claim is not current any more."""
    termination = outcome.termination
    return bool(
        move(
            [claim.rollout_id],
            to=STAGES[Stage.RUN].hands_to,
            guard=claim.guard,
            values={
                "artefacts": storable_json(outcome.artefacts),
                "fidelity": outcome.fidelity.value,
                "termination_phase": termination.phase.value,
                "termination_cause": termination.cause.value,
                "termination_blame": termination.blame.value,
                "termination_detail": storable_text(termination.detail),
            },
            data={"cause": termination.cause.value},
        )
    )
