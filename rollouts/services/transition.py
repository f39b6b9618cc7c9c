"""The one statement that moves rollouts: a guarded UPDATE whose row count decides, with its history and its attempt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connection
from psycopg.types.json import Jsonb

from rollouts.lifecycle import TERMINAL, EventKind, Stage, State
from rollouts.models import Rollout
from rollouts.prepared import execute_prepared

from .storable import storable_text

# The dispatcher listens here: something became claimable, or a slot became free.
DISPATCH_CHANNEL = "prorl_dispatch"


@dataclass(frozen=True)
class Guard:
    """What must still hold for a move to happen. `owner` is the worker process that must hold the lease."""

    states: Collection[State]
    attempt: int | None = None
    owner: UUID | None = None
    unheld: bool = False


@dataclass(frozen=True)
class Move:
    """One rollout's part of a bulk move: who must hold it in which attempt, its own columns, its note in the history."""

    id: UUID
    attempt: int | None = None
    owner: UUID | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AttemptEnd:
    """What the attempt's row says when a move ends the attempt. `stage` is None when no stage had it."""

    stage: Stage | None = None
    error: str = ""
    traceback: str = ""


class Moved(NamedTuple):
    """A rollout that was moved, as it is afterwards."""

    id: UUID
    attempt: int
    from_state: State


# Time since the last move goes to the stage that held the rollout, or to the queue when nobody did.
_ACCOUNTING = """
    queue_seconds = r.queue_seconds + CASE WHEN r.lease_owner_id IS NULL THEN old.elapsed ELSE 0 END,
    init_seconds = r.init_seconds + CASE WHEN r.state = 'initializing' THEN old.elapsed ELSE 0 END,
    run_seconds = r.run_seconds + CASE WHEN r.state = 'running' THEN old.elapsed ELSE 0 END,
    eval_seconds = r.eval_seconds
        + CASE WHEN r.state = 'evaluating' AND r.lease_owner_id IS NOT NULL THEN old.elapsed ELSE 0 END
"""
# A new attempt starts its accounts anew; what the last one used still counts against budgets.
_FRESH_ACCOUNTS = """
    queue_seconds = old.elapsed, init_seconds = 0, run_seconds = 0, eval_seconds = 0,
    earlier_tokens = r.earlier_tokens + r.prompt_tokens + r.sampled_tokens,
    earlier_sandbox_seconds = r.earlier_sandbox_seconds
        + CASE WHEN r.sandbox_name = '' THEN 0 ELSE r.init_seconds + r.run_seconds + r.eval_seconds END
"""

# The rows are locked in the order of their ids, so that two moves of the same rollouts cannot wait for each other.
_MOVE = """
WITH input AS (
    SELECT * FROM unnest({arrays}) AS i({names})
), old AS (
    SELECT i.*, r.state, GREATEST(EXTRACT(EPOCH FROM now() - r.state_changed_at), 0) AS elapsed
    FROM input i JOIN rollouts_rollout r ON r.id = i.input_id WHERE {guard} ORDER BY r.id FOR UPDATE OF r
), moved AS (
    UPDATE rollouts_rollout r SET {assignments} FROM old WHERE r.id = old.input_id
    RETURNING r.id, r.attempt, r.node, old.state AS from_state, old.input_data
), noted AS (
    INSERT INTO rollouts_rolloutevent (rollout_id, attempt, at, kind, from_state, to_state, data)
    SELECT id, attempt, now(), %(kind)s, from_state, %(to)s, input_data FROM moved
){attempts}{notice}
SELECT id, attempt, from_state{noticed} FROM moved
"""
# A hint that comes late, when it is void, would pass the limits that the dispatcher keeps.
_TAKEN = (
    "r.lease_owner_id IS NULL AND r.hinted_at IS NOT NULL",
    "EXISTS (SELECT FROM rollouts_workerprocess WHERE id = %(taker)s AND lost_at IS NULL AND stopped_at IS NULL)",
)
_BEGIN_ATTEMPTS = """, begun AS (
    INSERT INTO rollouts_attempt (rollout_id, number, node, started_at, stage, outcome, error, traceback)
    SELECT id, attempt, node, now(), '', '', '', '' FROM moved
)"""
_END_ATTEMPTS = """, ended AS (
    UPDATE rollouts_attempt a
    SET ended_at = now(), stage = %(end_stage)s, outcome = %(to)s, error = %(end_error)s, traceback = %(end_traceback)s
    FROM moved WHERE a.rollout_id = moved.id AND a.number = moved.attempt AND a.ended_at IS NULL
)"""
# A claim makes nothing claimable and frees nothing, so only other moves wake the dispatcher.
_NOTICE = ", notice AS MATERIALIZED (SELECT pg_notify(%(channel)s, '') WHERE EXISTS (SELECT FROM moved))"


def move(
    ids: Sequence[UUID],
    *,
    to: State,
    guard: Guard,
    kind: EventKind = EventKind.TRANSITION,
    new_attempt: bool = False,
    values: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    end: AttemptEnd | None = None,
) -> list[Moved]:
    """Move those of `ids` for which `guard` holds to `to`, set `values` (column -> value), and note it with `data`.

    The lease is given up unless `values` names a new owner. A move to a terminal state or back to the queue ends the attempt
    with `end`. A rollout that is missing from the answer was not changed.
    """
    moves = [Move(id_, guard.attempt, guard.owner, data=data or {}) for id_ in ids]
    return move_each(
        moves,
        to=to,
        states=guard.states,
        unheld=guard.unheld,
        kind=kind,
        new_attempt=new_attempt,
        values=values,
        end=end,
    )


def move_each(
    moves: Sequence[Move],
    *,
    to: State,
    states: Collection[State],
    unheld: bool = False,
    kind: EventKind = EventKind.TRANSITION,
    new_attempt: bool = False,
    values: Mapping[str, Any] | None = None,
    end: AttemptEnd | None = None,
    taker: UUID | None = None,
) -> list[Moved]:
    """The same for rollouts that differ in attempt, holder, values and note, in one statement. All set the same columns.

    With a `taker` only what is hinted moves, and only into the hands of that worker process, if it has not been declared lost.
    """
    if not moves:
        return []
    own = list(moves[0].values)
    parameters: dict[str, Any] = {
        "input_id": [m.id for m in moves],
        "input_attempt": [m.attempt for m in moves],
        "input_data": [Jsonb(dict(m.data)) for m in moves],
        "input_owner": [m.owner for m in moves],
        "states": [state.value for state in states],
        "kind": kind.value,
        "channel": DISPATCH_CHANNEL,
        "to": to.value,
    }
    arrays = {"input_id": "uuid", "input_attempt": "integer", "input_owner": "uuid", "input_data": "jsonb"}
    for column in own:
        arrays[f"each_{column}"] = _sql_type(column)
        parameters[f"each_{column}"] = [_adapted(m.values[column]) for m in moves]

    conditions = [
        "r.state = ANY(%(states)s)",
        "(i.input_attempt IS NULL OR r.attempt = i.input_attempt)",
        "(i.input_owner IS NULL OR r.lease_owner_id = i.input_owner)",
    ]
    if unheld:
        conditions.append("r.lease_owner_id IS NULL")
    if taker is not None:
        conditions += _TAKEN
        parameters["taker"] = taker

    assignments = ["state = %(to)s", "state_changed_at = now()", "hinted_at = NULL"]
    assignments.append(_FRESH_ACCOUNTS if new_attempt else _ACCOUNTING)
    if new_attempt:
        assignments.append("attempt = r.attempt + 1")
    if to in TERMINAL:
        assignments.append("finished_at = now(), finished_xid = pg_current_xact_id()::text::bigint")
    assignments += [f'"{column}" = old.each_{column}' for column in own]
    common = {"lease_owner_id": taker, **(values or {})}
    for column, value in common.items():
        assignments.append(f'"{column}" = %(set_{column})s')
        parameters[f"set_{column}"] = _adapted(value)

    attempts = _BEGIN_ATTEMPTS if new_attempt else ""
    if to in TERMINAL or to is State.QUEUED:
        attempts = _END_ATTEMPTS
        end = end or AttemptEnd()
        parameters["end_stage"] = end.stage.value if end.stage else ""
        parameters |= {"end_error": storable_text(end.error), "end_traceback": storable_text(end.traceback)}
    quiet = common["lease_owner_id"] is not None
    statement = _MOVE.format(
        arrays=", ".join(f"%({name})s::{sql_type}[]" for name, sql_type in arrays.items()),
        names=", ".join(arrays),
        guard=" AND ".join(conditions),
        assignments=", ".join(assignments),
        attempts=attempts,
        notice="" if quiet else _NOTICE,
        noticed="" if quiet else ", (SELECT count(*) FROM notice)",
    )
    return [Moved(row[0], row[1], State(row[2])) for row in execute_prepared(statement, parameters)]


def _sql_type(column: str) -> str:
    sql_type = Rollout._meta.get_field(column).db_type(connection)
    assert sql_type is not None  # noqa: S101 - every field of the model has a column
    # A cast to varchar(n) would cut a text that is too long, where the column refuses it.
    return "text" if sql_type.startswith("varchar") else sql_type


def _adapted(value: Any) -> Any:
    return Jsonb(value) if isinstance(value, dict) else value
