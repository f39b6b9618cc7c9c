"""Every rule of an LLM server's health."""

from __future__ import annotations

import pytest

from rollouts.scheduling.health import DEAD_AFTER, Condition, Sight, after

WELL, PROBE, CALL = Sight.WELL, Sight.FAILED_PROBE, Sight.FAILED_CALL


@pytest.mark.parametrize(
    ("before", "sight", "then"),
    [
        (("live", 0), WELL, ("live", 0)),
        (("live", 0), PROBE, ("suspect", 1)),
        (("live", 0), CALL, ("suspect", 1)),
        (("suspect", 1), WELL, ("live", 0)),
        (("suspect", 1), PROBE, ("suspect", 2)),
        (("suspect", DEAD_AFTER - 1), PROBE, ("dead", DEAD_AFTER)),
        (("suspect", DEAD_AFTER), CALL, ("suspect", DEAD_AFTER + 1)),  # only a probe declares it dead
        (("dead", 7), PROBE, ("dead", 8)),
        (("dead", 7), CALL, ("dead", 8)),
        (("dead", 7), WELL, ("recovering", 0)),
        (("recovering", 0, 29.0), WELL, ("recovering", 0)),
        (("recovering", 0, 30.0), WELL, ("live", 0)),
        (("recovering", 0, 10.0), PROBE, ("dead", 1)),
        (("recovering", 0, 10.0), CALL, ("dead", 1)),
    ],
)
def test_after(before: tuple[str, int], sight: Sight, then: tuple[str, int]) -> None:
    assert after(Condition(*before), sight, slow_start=30.0)[:2] == then


def test_without_slow_start_it_recovers_at_the_next_sight() -> None:
    assert after(Condition("recovering"), WELL, slow_start=0).health == "live"
