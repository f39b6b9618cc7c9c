"""Small charts as SVG shapes. They carry no text: axis labels are HTML beside them, so they scale and can be read aloud."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollouts.selectors.run_charts import RewardPoint

WIDTH, HEIGHT = 100, 40


class BandChart(NamedTuple):
    """A line in a band, as `points` attributes, with the values at the ends of the vertical axis."""

    line: str
    band: str
    low: float
    high: float
    last: RewardPoint


def reward_chart(series: Sequence[RewardPoint]) -> BandChart | None:
    """The rewards of a run; None when there is nothing to draw. The axis always holds 0 and 1."""
    if len(series) < 2:
        return None
    low = min(0.0, *(point.p10 for point in series))
    high = max(1.0, *(point.p90 for point in series))

    def place(index: int, value: float) -> str:
        x = WIDTH * index / (len(series) - 1)
        return f"{x:.2f},{HEIGHT * (1 - (value - low) / (high - low)):.2f}"

    upper = [place(i, point.p90) for i, point in enumerate(series)]
    lower = [place(i, point.p10) for i, point in enumerate(series)]
    line = [place(i, point.mean) for i, point in enumerate(series)]
    return BandChart(" ".join(line), " ".join(upper + lower[::-1]), low, high, series[-1])
