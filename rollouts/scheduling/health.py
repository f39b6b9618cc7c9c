"""How an LLM server's health follows what is seen of it. The whole of the rules is `after`."""

from __future__ import annotations

import enum
from typing import NamedTuple

from rollouts.models import LLMServer

DEAD_AFTER = 3  # failures in a row

Health = LLMServer.Health


class Sight(enum.Enum):
    """What was seen of a server."""

    WELL = "well"  # it answered a probe; where it was not live before, by sampling a token
    FAILED_PROBE = "failed probe"
    FAILED_CALL = "failed call"  # a worker's


class Condition(NamedTuple):
    """`failures` in a row, and for how many seconds it has had this health."""

    health: str
    failures: int = 0
    seconds: float = 0.0


def after(condition: Condition, sight: Sight, *, slow_start: float) -> Condition:
    """The condition that follows.

    A live server that fails is suspect: it gets nothing new until a probe finds it well, and is dead when it goes on failing.
    A dead one that answers again is recovering: filled slowly for `slow_start` seconds, and dead again at the first failure.
    """
    health, failures, seconds = condition
    if sight is Sight.WELL:
        if health == Health.DEAD:
            return Condition(Health.RECOVERING)
        if health == Health.RECOVERING and seconds < slow_start:
            return Condition(Health.RECOVERING, 0, seconds)
        return Condition(Health.LIVE, 0, seconds if health == Health.LIVE else 0.0)
    failures += 1
    if health == Health.RECOVERING:
        return Condition(Health.DEAD, failures)
    if health == Health.LIVE:
        return Condition(Health.SUSPECT, failures)
    if health == Health.SUSPECT and sight is Sight.FAILED_PROBE and failures >= DEAD_AFTER:
        return Condition(Health.DEAD, failures)
    return Condition(health, failures, seconds)
