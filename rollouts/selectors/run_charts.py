"""How a run's rewards developed: as few points as a small chart needs."""

from __future__ import annotations

from typing import NamedTuple

from django.db import connection

from rollouts.models import Run

MOST_POINTS = 40
FEWEST_REWARDS = 8  # fewer make no curve
MOST_REWARDS = 5_000  # of more, a sample is read
_PER_POINT = 4

_ALL = """
SELECT avg(reward),
    percentile_cont(0.1) WITHIN GROUP (ORDER BY reward), percentile_cont(0.9) WITHIN GROUP (ORDER BY reward), count(*)
FROM (
    SELECT reward, ntile(%(points)s) OVER (ORDER BY finished_xid, id) AS place
    FROM rollouts_rollout WHERE run_id = %(run)s AND reward IS NOT NULL
) AS scored
GROUP BY place ORDER BY place
"""

# Places at equal distances of transaction ids, which is nearly of time, and the rewards that follow on each.
_SAMPLED = """
WITH bounds AS (
    SELECT (SELECT finished_xid FROM rollouts_rollout WHERE run_id = %(run)s AND finished_xid IS NOT NULL
            ORDER BY finished_xid, id LIMIT 1) AS first,
           (SELECT finished_xid FROM rollouts_rollout WHERE run_id = %(run)s AND finished_xid IS NOT NULL
            ORDER BY finished_xid DESC, id DESC LIMIT 1) AS last
)
SELECT avg(reward),
    percentile_cont(0.1) WITHIN GROUP (ORDER BY reward), percentile_cont(0.9) WITHIN GROUP (ORDER BY reward), count(*)
FROM bounds, generate_series(0, %(points)s - 1) place, LATERAL (
    SELECT reward FROM rollouts_rollout
    WHERE run_id = %(run)s AND reward IS NOT NULL AND finished_xid >= first + (last - first) * place / %(points)s
      AND (finished_xid < first + (last - first) * (place + 1) / %(points)s OR place = %(points)s - 1)
    ORDER BY finished_xid, id LIMIT %(rewards)s
) scored
GROUP BY place ORDER BY place
"""


class RewardPoint(NamedTuple):
    """Consecutively finished rollouts: the mean of their rewards, and the band that holds the middle four fifths."""

    mean: float
    p10: float
    p90: float
    n: int


def reward_series(run: Run, scored: int) -> list[RewardPoint]:
    """The run's rewards in the order the rollouts finished; empty when there are too few for a curve.

    Of up to `MOST_REWARDS` in equal parts; of more, some at as many places.
    """
    if scored < FEWEST_REWARDS:
        return []
    points = min(MOST_POINTS, scored // _PER_POINT)
    statement = _ALL if scored <= MOST_REWARDS else _SAMPLED
    with connection.cursor() as cursor:
        cursor.execute(statement, {"run": run.pk, "points": points, "rewards": MOST_REWARDS // points})
        return [RewardPoint(*row) for row in cursor.fetchall()]
