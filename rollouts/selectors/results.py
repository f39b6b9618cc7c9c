"""The stream of a run's finished rollouts: every one exactly once, in a stable order, never skipping a late commit."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple
from uuid import UUID

from django.db import connection
from django.db.models import BooleanField, QuerySet
from django.db.models.expressions import RawSQL

from rollouts.lifecycle import TERMINAL, State
from rollouts.models import Reward, Rollout, Run
from rollouts.models.feed import SETTLED


class Position(NamedTuple):
    """A place in the stream: that of the last rollout delivered."""

    xid: int
    id: UUID


START = Position(0, UUID(int=0))


_UNFINISHED = sorted(state.value for state in State if state not in TERMINAL)


class Results(NamedTuple):
    """Rollouts after a position. `outstanding` tells whether the run has any more to deliver, now or later."""

    rollouts: list[Rollout]
    last: Position
    outstanding: bool


# Transactions commit in another order than they begin. Were rollouts delivered by time or id, one whose transaction commits
# late could appear *behind* a cursor that has already passed, and never be delivered. So they are ordered by the id of the
# transaction that finished them, and only those are delivered whose id is below the oldest transaction still running: no
# transaction that can yet commit has a smaller id, so nothing can appear behind the cursor any more. The price: a long write
# transaction anywhere in the database cluster delays delivery until it ends.
_SETTLED = RawSQL(SETTLED, [])  # noqa: S611  (constant)


def results_after(run: Run, after: Position, limit: int) -> Results:
    """At most `limit` finished rollouts after `after`.

    `outstanding` is asked in a later snapshot than the rollouts, which errs on the safe side: a rollout that finishes in
    between lies after the cursor, so it still counts as outstanding.
    """
    finished = _after(Rollout.objects.filter(run=run), after)
    page = (
        finished.filter(finished_xid__lt=_SETTLED)
        .select_related("environment", "task")
        .defer("artefacts", "task__payload", "environment__config")
    )
    rollouts = list(page.order_by("finished_xid", "id")[:limit])
    last = position_of(rollouts[-1]) if rollouts else after
    return Results(rollouts, last, _outstanding(run, last))


def newest_positions(run_ids: Collection[UUID]) -> dict[UUID, Position]:
    """Up to where each run can be delivered now, in one query. Runs without anything to deliver are left out."""
    with connection.cursor() as cursor:
        cursor.execute(_NEWEST, [list(run_ids)])
        return {run_id: Position(xid, id_) for run_id, xid, id_ in cursor.fetchall()}


_NEWEST = f"""
SELECT wanted.run_id, newest.finished_xid, newest.id FROM unnest(%s::uuid[]) AS wanted (run_id)
CROSS JOIN LATERAL (
    SELECT finished_xid, id FROM rollouts_rollout
    WHERE run_id = wanted.run_id AND finished_xid < {SETTLED}
    ORDER BY finished_xid DESC, id DESC LIMIT 1
) newest
"""  # noqa: S608 - constants


def position_of(rollout: Rollout) -> Position:
    """The place of a finished rollout."""
    assert rollout.finished_xid is not None  # noqa: S101  (a constraint of the table)
    return Position(rollout.finished_xid, rollout.id)


def _outstanding(run: Run, after: Position) -> bool:
    unfinished = Rollout.objects.filter(run=run, state__in=_UNFINISHED)
    return unfinished.exists() or _after(Rollout.objects.filter(run=run), after).exists()


def _after(rollouts: QuerySet[Rollout], after: Position) -> QuerySet[Rollout]:
    # A row comparison is one range of the index, even where thousands were cancelled by one transaction.
    later = "(rollouts_rollout.finished_xid, rollouts_rollout.id) > (%s, %s)"
    return rollouts.filter(RawSQL(later, [after.xid, after.id], BooleanField()))  # noqa: S611  (constant)


def newest_rewards(rollouts: list[Rollout]) -> dict[UUID, dict[str, float | None]]:
    """The components of each rollout's newest reward version, in one query."""
    found: dict[UUID, dict[str, float | None]] = {rollout.id: {} for rollout in rollouts}
    newest: dict[UUID, int] = {}
    for row in Reward.objects.filter(rollout_id__in=list(found)).order_by("rollout_id", "-version", "id"):
        if newest.setdefault(row.rollout_id, row.version) == row.version:
            found[row.rollout_id][row.name] = row.value
    return found
