"""Keeps each run's sums over its finished rollouts up to date. Whoever reads them adds what finished since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Exists, OuterRef

from rollouts.models import Rescoring, Rollout, RunTally
from rollouts.models.feed import SETTLED
from rollouts.models.tally import CELL_GROUP, CELL_SUMS

from .feed import BATCH, advance

_GROUP_COLUMNS = len(CELL_GROUP.split(","))

_LAST = f"""
SELECT finished_xid, id FROM rollouts_rollout
WHERE run_id = %s AND finished_xid IS NOT NULL AND (finished_xid, id) > (%s, %s)
  AND finished_xid < {SETTLED}
ORDER BY finished_xid DESC, id DESC LIMIT 1
"""  # noqa: S608 - constants
_CELLS = f"""
SELECT {CELL_GROUP}, {CELL_SUMS} FROM rollouts_rollout
WHERE run_id = %s AND finished_xid IS NOT NULL AND (finished_xid, id) > (%s, %s) AND (finished_xid, id) <= (%s, %s)
GROUP BY {CELL_GROUP}
"""  # noqa: S608 - constants
_RESTART = """
INSERT INTO rollouts_runtally (run_id, xid, rollout_id, cells)
SELECT run_id, 0, '00000000-0000-0000-0000-000000000000', '[]' FROM rollouts_rollout WHERE id = %s
ON CONFLICT (run_id) DO UPDATE SET xid = 0, rollout_id = excluded.rollout_id, cells = '[]'
"""


def keep_tallies() -> None:
    """Count what has finished since the last time, and runs that have to be counted anew."""
    while advance("tallies", _count) == BATCH:
        pass
    being_rescored = Rescoring.objects.filter(run=OuterRef("run"), finished_at=None)
    for tally in RunTally.objects.filter(~Exists(being_rescored), xid=0):
        _advance(tally.run_id)


def restart_tally(*, rollout_id: UUID) -> None:
    """To be called in the transaction that changes a finished rollout: its run is counted anew once that has calmed down."""
    with connection.cursor() as cursor:
        cursor.execute(_RESTART, [rollout_id])


def _count(finished: list[UUID]) -> None:
    for run_id in Rollout.objects.filter(id__in=finished).order_by("run_id").values_list("run_id", flat=True).distinct():
        tally, _ = RunTally.objects.get_or_create(run_id=run_id)
        if tally.xid:
            _advance(run_id)


@transaction.atomic
def _advance(run_id: UUID) -> None:
    """Add what lies between the tally's place and the last rollout that nothing can come before any more (ADR 7)."""
    tally = RunTally.objects.select_for_update().get(run_id=run_id)
    begins: list[Any] = [tally.xid, tally.rollout_id]
    with connection.cursor() as cursor:
        cursor.execute(_LAST, [run_id, *begins])
        last = cursor.fetchone()
        if last is None:
            return
        cursor.execute(_CELLS, [run_id, *begins, *last])
        tally.cells = _merged([*tally.cells, *cursor.fetchall()])
    tally.xid, tally.rollout_id = last
    tally.save()


def _merged(cells: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """One cell for each end: sums are added, and of the last column, a moment, the later one stays."""
    merged: dict[tuple[Any, ...], list[Any]] = {}
    for cell in cells:
        group, sums = tuple(cell[:_GROUP_COLUMNS]), list(cell[_GROUP_COLUMNS:])
        if known := merged.get(group):
            sums = [*(a + b for a, b in zip(known[:-1], sums[:-1], strict=True)), max(known[-1], sums[-1])]
        merged[group] = sums
    return [[*group, *sums] for group, sums in merged.items()]
