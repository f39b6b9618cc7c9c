"""What held rollouts write on their way, many rollouts at a time: their turns, and the hand-over to the next stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rollouts.engine.records import RunOutcome, TurnRecord
from rollouts.lifecycle import STAGES, Stage
from rollouts.prepared import execute_prepared

from . import turn_rows
from .claim import Claim
from .finish import termination_values
from .storable import storable_json
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
)"""
_TOOLS = """, tools AS (
    INSERT INTO rollouts_toolcall ({tool_columns})
    SELECT {tool_columns} FROM unnest({tool_arrays}) AS t({tool_columns}) JOIN held USING (rollout_id, attempt)
    ON CONFLICT (rollout_id, attempt, turn, index) DO NOTHING
)"""
_PICTURES = """, tool_pictures AS (
    INSERT INTO rollouts_toolpicture ({tool_picture_columns})
    SELECT {tool_picture_columns} FROM unnest({tool_picture_arrays}) AS p({tool_picture_columns})
    JOIN held USING (rollout_id, attempt)
    ON CONFLICT (rollout_id, attempt, turn, call, index) DO NOTHING
), message_pictures AS (
    INSERT INTO rollouts_messagepicture ({message_picture_columns})
    SELECT {message_picture_columns} FROM unnest({message_picture_arrays}) AS p({message_picture_columns})
    JOIN held USING (rollout_id, attempt)
    ON CONFLICT (rollout_id, attempt, message, index) DO NOTHING
)"""

_STORED = """
SELECT rollout_id, attempt FROM held
"""


class _Statement(NamedTuple):
    """SQL, and the tables that it writes to by the prefix of their parameters."""

    sql: str
    tables: Mapping[str, Mapping[str, str]]


def _statement(*parts: str, **tables: Mapping[str, str]) -> _Statement:
    names = {f"{prefix}_columns": turn_rows.columns(table) for prefix, table in tables.items()}
    names |= {f"{prefix}_arrays": turn_rows.arrays(prefix, table) for prefix, table in tables.items()}
    return _Statement("".join(parts).format(**names), tables)


# Each connection plans each of them once, so there are few.
_REPLIES = _statement(_RECORD, _STORED, call=turn_rows.CALL, message=turn_rows.MESSAGE)
_WITH_TOOLS = _statement(_RECORD, _TOOLS, _STORED, **_REPLIES.tables, tool=turn_rows.TOOL)
_WITH_PICTURES = _statement(
    *(_RECORD, _TOOLS, _PICTURES, _STORED),
    **_WITH_TOOLS.tables,
    tool_picture=turn_rows.TOOL_PICTURE,
    message_picture=turn_rows.MESSAGE_PICTURE,
)


def record_turns(writes: Sequence[TurnWrite]) -> list[bool]:
    """Store turns, at most one of each rollout. False, and nothing is stored, where the claim is not current any more.

    Their pictures and large outputs are blobs already.
    """
    now = datetime.now(UTC)
    rows = {
        "call": [row for write in writes for row in turn_rows.call_rows(*write, now)],
        "message": [row for write in writes for row in turn_rows.message_rows(*write)],
        "tool": [row for write in writes for row in turn_rows.tool_rows(*write)],
        "tool_picture": [row for write in writes for row in turn_rows.tool_picture_rows(*write)],
        "message_picture": [row for write in writes for row in turn_rows.message_picture_rows(*write)],
    }
    statement = _WITH_TOOLS if rows["tool"] else _REPLIES
    if rows["tool_picture"] or rows["message_picture"]:
        statement = _WITH_PICTURES
    parameters: dict[str, Any] = {
        "state": STAGES[Stage.RUN].holds_in.value,
        "id": [write.claim.rollout_id for write in writes],
        "attempt": [write.claim.attempt for write in writes],
        "owner": [write.claim.owner for write in writes],
    }
    for prefix, table in statement.tables.items():
        parameters |= turn_rows.parameters(prefix, table, rows[prefix])
    stored = set(execute_prepared(statement.sql, parameters))
    return [(write.claim.rollout_id, write.claim.attempt) in stored for write in writes]


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
