"""What held rollouts write on their way, many rollouts at a time: their turns, and the hand-over to the next stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg.types.json import Jsonb

from rollouts.engine.records import RunOutcome, TurnRecord
from rollouts.lifecycle import STAGES, Stage
from rollouts.models import ModelCall
from rollouts.prepared import execute_prepared

from .claim import Claim
from .finish import termination_values
from .storable import storable_json, storable_text
from .transition import Move, move_each


class TurnWrite(NamedTuple):
    """A turn of a held rollout."""

    claim: Claim
    record: TurnRecord


class Initialized(NamedTuple):
    """INIT is done; `sandbox_name` is empty when the environment needs none."""

    claim: Claim
    sandbox_name: str


class Ran(NamedTuple):
    """RUN is done."""

    claim: Claim
    outcome: RunOutcome


# One statement stores the turns of many rollouts, whole or not at all for each of them. It may be repeated when its answer was
# lost: rows that are there already stay, and what a call adds to the rollout's counts is added with the row. From a process
# that was declared lost nothing is taken, held or not: nobody waits for its calls before new weights are loaded.
_RECORD = """
WITH held AS (
    SELECT r.id AS rollout_id, r.attempt
    FROM unnest(%(id)s::uuid[], %(attempt)s::int[], %(owner)s::uuid[]) AS i(id, attempt, owner)
    JOIN rollouts_rollout r ON r.id = i.id JOIN rollouts_workerprocess w ON w.id = i.owner AND w.lost_at IS NULL
    WHERE r.attempt = i.attempt AND r.lease_owner_id = i.owner AND r.state = %(state)s ORDER BY r.id FOR UPDATE OF r
), calls AS (
    INSERT INTO rollouts_modelcall ({call_columns})
    SELECT {call_columns} FROM unnest({call_arrays}) AS c({call_columns}) JOIN held USING (rollout_id, attempt)
    ON CONFLICT (rollout_id, attempt, turn) DO NOTHING
    RETURNING rollout_id, context_ids, sampled_ids, policy_version, policy_version_last
), counted AS (
    UPDATE rollouts_rollout r SET
        turns = turns + 1, policy_version = COALESCE(calls.policy_version_last, calls.policy_version),
        oldest_version = LEAST(r.oldest_version, calls.policy_version, calls.policy_version_last),
        prompt_tokens = prompt_tokens + length(calls.context_ids) / 4,
        sampled_tokens = sampled_tokens + length(calls.sampled_ids) / 4
    FROM calls WHERE r.id = calls.rollout_id
), messages AS (
    INSERT INTO rollouts_message ({message_columns})
    SELECT {message_columns} FROM unnest({message_arrays}) AS m({message_columns}) JOIN held USING (rollout_id, attempt)
    ON CONFLICT (rollout_id, attempt, index) DO NOTHING
){tools}
SELECT rollout_id, attempt FROM held
"""
_PICTURES = """, pictures AS (
    INSERT INTO rollouts_toolpicture ({picture_columns})
    SELECT {picture_columns} FROM unnest({picture_arrays}) AS p({picture_columns}) JOIN held USING (rollout_id, attempt)
    ON CONFLICT (rollout_id, attempt, turn, call, index) DO NOTHING
)"""
_TOOLS = """, tools AS (
    INSERT INTO rollouts_toolcall ({tool_columns})
    SELECT {tool_columns} FROM unnest({tool_arrays}) AS t({tool_columns}) JOIN held USING (rollout_id, attempt)
    ON CONFLICT (rollout_id, attempt, turn, index) DO NOTHING
)"""

_PLACE = {"rollout_id": "uuid", "attempt": "int"}
_CALL = _PLACE | {
    **{"turn": "int", "segment": "int", "context_ids": "bytea", "sampled_ids": "bytea", "logprobs": "bytea", "text": "text"},
    **{"finish_reason": "text", "prompt_tokens": "int", "policy": "text", "policy_version": "int", "server_id": "uuid"},
    **{"policy_version_last": "int", "version_spans": "jsonb", "opened_by": "text", "parent_segment": "int", "dialect": "text"},
    "conversation_key": "text",
    **{"sampling": "jsonb", "latency": "float8", "at": "timestamptz"},
}
_MESSAGE = _PLACE | {"index": "int", "turn": "int", "role": "text", "name": "text", "content": "text"}
_TOOL = _PLACE | {
    **{
        "turn": "int",
        "index": "int",
        "name": "text",
        "arguments": "jsonb",
        "raw": "text",
        "output": "text",
        "output_blob_id": "text",
        "exit_code": "int",
    },
    **{"timed_out": "bool", "truncated_bytes": "bigint", "error": "text", "started_at": "timestamptz", "duration": "float8"},
    **{"note": "text", "running": "bool", "limit_exceeded": "text"},
}
_PICTURE = _PLACE | {"turn": "int", "call": "int", "index": "int", "mime": "text", "blob_id": "text"}


def _columns(columns: Mapping[str, str]) -> str:
    return ", ".join(columns)


def _arrays(prefix: str, columns: Mapping[str, str]) -> str:
    return ", ".join(f"%({prefix}_{name})s::{sql_type}[]" for name, sql_type in columns.items())


def _parameters(prefix: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {f"{prefix}_{name}": [row[name] for row in rows] for name in columns}


_RECORD_TOOLS = _TOOLS.format(tool_columns=_columns(_TOOL), tool_arrays=_arrays("tool", _TOOL))
_RECORD_PICTURES = _PICTURES.format(picture_columns=_columns(_PICTURE), picture_arrays=_arrays("picture", _PICTURE))
_STATEMENTS = {
    parts: _RECORD.format(
        call_columns=_columns(_CALL),
        call_arrays=_arrays("call", _CALL),
        message_columns=_columns(_MESSAGE),
        message_arrays=_arrays("message", _MESSAGE),
        tools="".join(parts),
    )
    for parts in [(), (_RECORD_TOOLS,), (_RECORD_TOOLS, _RECORD_PICTURES)]
}


def record_turns(writes: Sequence[TurnWrite]) -> list[bool]:
    """Store turns, at most one of each rollout. False, and nothing is stored, where the claim is not current any more."""
    now = datetime.now(UTC)
    calls = [_call(write, now) for write in writes if write.record.model_call]
    messages = [row for write in writes for row in _messages(write)]
    tools = [row for write in writes for row in _tool_calls(write)]
    pictures = [row for write in writes for row in _pictures(write)]
    parameters: dict[str, Any] = {
        "state": STAGES[Stage.RUN].holds_in.value,
        "id": [write.claim.rollout_id for write in writes],
        "attempt": [write.claim.attempt for write in writes],
        "owner": [write.claim.owner for write in writes],
        **_parameters("call", _CALL, calls),
        **_parameters("message", _MESSAGE, messages),
    }
    parts: tuple[str, ...] = ()
    if tools:
        parts = (_RECORD_TOOLS,)
        parameters |= _parameters("tool", _TOOL, tools)
    if pictures:
        parts = (_RECORD_TOOLS, _RECORD_PICTURES)
        parameters |= _parameters("picture", _PICTURE, pictures)
    stored = set(execute_prepared(_STATEMENTS[parts], parameters))
    return [(write.claim.rollout_id, write.claim.attempt) in stored for write in writes]


def _place(claim: Claim) -> dict[str, Any]:
    return {"rollout_id": claim.rollout_id, "attempt": claim.attempt}


def _call(write: TurnWrite, now: datetime) -> dict[str, Any]:
    call = write.record.model_call
    assert call is not None  # noqa: S101 - asked for by the only caller
    return {
        **_place(write.claim),
        "turn": call.turn,
        "segment": call.segment,
        "context_ids": _packed("context_ids", call.context_ids),
        "sampled_ids": _packed("sampled_ids", call.sampled_ids),
        "logprobs": None if call.logprobs is None else _packed("logprobs", call.logprobs),
        "text": storable_text(call.text),
        "finish_reason": call.finish_reason,
        "prompt_tokens": call.prompt_tokens,
        "policy": call.policy,
        "policy_version": call.policy_version,
        "server_id": UUID(call.server_id) if call.server_id else None,
        "sampling": Jsonb(storable_json(call.sampling)),
        "policy_version_last": None if call.policy_version_last == call.policy_version else call.policy_version_last,
        "version_spans": Jsonb([list(span) for span in call.version_spans]),
        "opened_by": call.opened_by,
        "parent_segment": call.parent_segment,
        "dialect": call.dialect,
        "conversation_key": call.conversation_key,
        "latency": call.latency,
        "at": now,
    }


def _packed(column: str, values: Sequence[Any]) -> bytes:
    field: Any = ModelCall._meta.get_field(column)
    return bytes(field.pack(values))


def _messages(write: TurnWrite) -> list[dict[str, Any]]:
    return [
        {
            **_place(write.claim),
            "index": m.index,
            "turn": m.turn,
            "role": m.role,
            "name": storable_text(m.name)[:60],
            "content": storable_text(m.content),
        }
        for m in write.record.messages
    ]


def _tool_calls(write: TurnWrite) -> list[dict[str, Any]]:
    return [
        {
            **_place(write.claim),
            "turn": t.turn,
            "index": t.index,
            "name": storable_text(t.name)[:60],
            "arguments": Jsonb(storable_json(t.arguments)),
            "raw": storable_text(t.raw),
            "output": storable_text(t.output),
            "output_blob_id": t.output_blob,
            "exit_code": t.exit_code,
            "timed_out": t.timed_out,
            "truncated_bytes": t.truncated_bytes,
            "error": storable_text(t.error),
            "note": storable_text(t.note),
            "running": t.running,
            "limit_exceeded": t.limit_exceeded[:30],
            "started_at": datetime.fromtimestamp(t.started_at, UTC),
            "duration": t.duration,
        }
        for t in write.record.tool_calls
    ]


def _pictures(write: TurnWrite) -> list[dict[str, Any]]:
    return [
        {
            **_place(write.claim),
            "turn": t.turn,
            "call": t.index,
            "index": index,
            "mime": storable_text(picture.mime)[:40],
            "blob_id": blob,
        }
        for t in write.record.tool_calls
        for index, (picture, blob) in enumerate(zip(t.pictures, t.picture_blobs, strict=True))
    ]


def hand_over_ready(done: Sequence[Initialized]) -> list[bool]:
    """INIT is done. False where the claim is not current any more."""
    moves = [d.claim.move(values={"sandbox_name": d.sandbox_name}) for d in done]
    return _hand_over(Stage.INIT, moves)


def hand_over_for_evaluation(done: Sequence[Ran]) -> list[bool]:
    """RUN is done: store what evaluation needs before the sandbox goes. False where the claim is not current any more."""
    moves = [
        claim.move(
            values={
                "artefacts": storable_json(outcome.artefacts),
                "artefacts_blob_id": outcome.artefacts_blob,
                "fidelity": outcome.fidelity.value,
                **termination_values(outcome.termination),
            },
            data={"cause": outcome.termination.cause.value},
        )
        for claim, outcome in done
    ]
    return _hand_over(Stage.RUN, moves)


def _hand_over(stage: Stage, moves: Sequence[Move]) -> list[bool]:
    moved = {m.id for m in move_each(moves, to=STAGES[stage].hands_to, states=[STAGES[stage].holds_in])}
    return [m.id in moved for m in moves]
