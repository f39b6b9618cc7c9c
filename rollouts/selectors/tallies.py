"""What the rollouts of runs add up to: the kept sums over the finished ones, and what has happened since."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection
from typing import NamedTuple
from uuid import UUID

from django.db import connection

from rollouts.lifecycle import TERMINAL, State
from rollouts.models.tally import CELL_GROUP, CELL_SUMS

# One statement, so one snapshot: a rollout is either in the kept sums or read.
_READ = f"""
WITH chosen AS (
    SELECT run.id, coalesce(t.xid, 0) AS xid, coalesce(t.rollout_id, '00000000-0000-0000-0000-000000000000') AS rollout_id,
           coalesce(t.cells, '[]') AS cells
    FROM rollouts_run run LEFT JOIN rollouts_runtally t ON t.run_id = run.id WHERE run.id = ANY(%(runs)s)
)
SELECT c.id, cell->>0, cell->>1, cell->>2, (cell->>3)::bigint, (cell->>4)::bigint, (cell->>5)::bigint, (cell->>6)::float8,
       (cell->>7)::float8, (cell->>8)::bigint, (cell->>9)::bigint, (cell->>10)::bigint, (cell->>11)::bigint, (cell->>12)::float8
FROM chosen c, jsonb_array_elements(c.cells) cell
UNION ALL
SELECT c.id, finished.* FROM chosen c, LATERAL (
    SELECT {CELL_GROUP}, {CELL_SUMS} FROM rollouts_rollout
    WHERE run_id = c.id AND finished_xid IS NOT NULL AND (finished_xid, id) > (c.xid, c.rollout_id) GROUP BY {CELL_GROUP}
) finished
UNION ALL
SELECT c.id, unfinished.* FROM chosen c, LATERAL (
    SELECT {CELL_GROUP}, {CELL_SUMS} FROM rollouts_rollout
    WHERE run_id = c.id AND state = ANY(%(unfinished)s) GROUP BY {CELL_GROUP}
) unfinished
"""  # noqa: S608 - constants
_UNFINISHED = [state.value for state in State if state not in TERMINAL]


class Cell(NamedTuple):
    """Rollouts of a run in the same state and with the same end; a run may have several cells of one kind."""

    state: str
    cause: str
    blame: str
    n: int
    scored: int
    trainable: int
    reward_sum: float
    reward_squares: float
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    retries: int
    changed: float  # seconds since the epoch

    @property
    def finished(self) -> bool:
        return self.state in TERMINAL

    @property
    def changed_at(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.changed, dt.UTC)


def cells_of(runs: Collection[UUID]) -> dict[UUID, list[Cell]]:
    """The cells of some runs, in one query whose cost does not grow with what has finished."""
    found: dict[UUID, list[Cell]] = {run: [] for run in runs}
    with connection.cursor() as cursor:
        cursor.execute(_READ, {"runs": list(found), "unfinished": _UNFINISHED})
        for run_id, *values in cursor.fetchall():
            found[run_id].append(Cell(*values))
    return found


def counts_by_state(cells: Collection[Cell]) -> dict[str, int]:
    """How many rollouts are in each state that has any."""
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell.state] = counts.get(cell.state, 0) + cell.n
    return counts


def mean_and_std(cells: Collection[Cell]) -> tuple[float | None, float | None]:
    """Mean and standard deviation of the rewards; None when there are none."""
    n = sum(cell.scored for cell in cells)
    if not n:
        return None, None
    mean = sum(cell.reward_sum for cell in cells) / n
    return mean, math.sqrt(max(sum(cell.reward_squares for cell in cells) / n - mean * mean, 0.0))
