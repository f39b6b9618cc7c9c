"""How a run's rewards developed, as few points as a small chart needs."""

from __future__ import annotations

from typing import NamedTuple

from django.db import connection

from rollouts.models import Run

MOST_POINTS = 40
FEWEST_REWARDS = 8  # fewer make no curve
_PER_POINT = 4

_SERIES = """
SELECT avg(reward),
    percentile_cont(0.1) WITHIN GROUP (ORDER BY reward), percentile_cont(0.9) WITHIN GROUP (ORDER BY reward), count(*)
FROM (
    SELECT reward, ntile(%s) OVER (ORDER BY finished_xid, id) AS place
    FROM rollouts_rollout WHERE run_id = %s AND reward IS NOT NULL
) AS scored
GROUP BY place ORDER BY place
"""


class RewardPoint(NamedTuple):
    """Consecutively finished rollouts: the mean of their rewards, and the band that holds the middle four fifths."""

    mean: float
    p10: float
    p90: float
    n: int


def reward_series(run: Run, scored: int) -> list[RewardPoint]:
    """The run's rewards in the order the rollouts finished, in equal parts; empty when there are too few for a curve."""
    if scored < FEWEST_REWARDS:
        return []
    points = min(MOST_POINTS, scored // _PER_POINT)
    with connection.cursor() as cursor:
        cursor.execute(_SERIES, [points, run.pk])
        return [RewardPoint(*row) for row in cursor.fetchall()]
