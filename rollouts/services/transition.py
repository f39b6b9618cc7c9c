"""The one statement that moves rollouts: a guarded UPDATE whose row count decides, and its history row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connection
from psycopg.types.json import Jsonb

from rollouts.lifecycle import TERMINAL, EventKind, State

# The dispatcher listens here: something became claimable, or a slot became free.
DISPATCH_CHANNEL = "prorl_dispatch"


@dataclass(frozen=True)
class Guard:
    """What must still hold for a move to happen. `owner` is the worker process that must hold the lease."""

    states: Collection[State]
    attempt: int | None = None
    owner: UUID | None = None
    unheld: bool = False


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
# A new attempt starts its accounts anew.
_FRESH_ACCOUNTS = "queue_seconds = old.elapsed, init_seconds = 0, run_seconds = 0, eval_seconds = 0"

_MOVE = """
WITH old AS (
    SELECT id, state, GREATEST(EXTRACT(EPOCH FROM now() - state_changed_at), 0) AS elapsed
    FROM rollouts_rollout WHERE {guard} ORDER BY id FOR UPDATE
), moved AS (
    UPDATE rollouts_rollout r SET {assignments} FROM old WHERE r.id = old.id
    RETURNING r.id, r.attempt, old.state AS from_state
), noted AS (
    INSERT INTO rollouts_rolloutevent (rollout_id, attempt, at, kind, from_state, to_state, data)
    SELECT id, attempt, now(), %(kind)s, from_state, %(to)s, %(data)s FROM moved
)
SELECT id, attempt, from_state, pg_notify('{channel}', '') FROM moved
"""


def move(
    ids: Sequence[UUID],
    *,
    to: State,
    guard: Guard,
    kind: EventKind = EventKind.TRANSITION,
    new_attempt: bool = False,
    values: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> list[Moved]:
    """Move those of `ids` for which `guard` holds to `to`, set `values` (column -> value), and note it with `data`.

    The lease is given up unless `values` names a new owner. A rollout that is missing from the answer was not changed.
    """
    conditions = ["id = ANY(%(ids)s)", "state = ANY(%(states)s)"]
    parameters: dict[str, Any] = {
        "ids": list(ids),
        "states": [state.value for state in guard.states],
        "kind": kind.value,
        "to": to.value,
        "data": Jsonb(dict(data or {})),
    }
    if guard.attempt is not None:
        conditions.append("attempt = %(attempt)s")
        parameters["attempt"] = guard.attempt
    if guard.owner is not None:
        conditions.append("lease_owner_id = %(owner)s")
        parameters["owner"] = guard.owner
    if guard.unheld:
        conditions.append("lease_owner_id IS NULL")

    assignments = ["state = %(to)s", "state_changed_at = now()", "hinted_at = NULL"]
    assignments.append(_FRESH_ACCOUNTS if new_attempt else _ACCOUNTING)
    if new_attempt:
        assignments.append("attempt = r.attempt + 1")
    if to in TERMINAL:
        assignments.append("finished_at = now(), finished_xid = pg_current_xact_id()::text::bigint")
    columns = {"lease_owner_id": None, **(values or {})}
    for column, value in columns.items():
        assignments.append(f'"{column}" = %(set_{column})s')
        parameters[f"set_{column}"] = Jsonb(value) if isinstance(value, dict) else value

    statement = _MOVE.format(guard=" AND ".join(conditions), assignments=", ".join(assignments), channel=DISPATCH_CHANNEL)
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return [Moved(id_, attempt, State(from_state)) for id_, attempt, from_state, _ in cursor.fetchall()]
