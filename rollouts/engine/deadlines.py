"""All the time limits that hold at once, and which of them strikes first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rollouts.engine.errors import AttemptTimedOut, StageTimedOut
from rollouts.lifecycle import Stage
from rollouts.run_settings import TimeoutSettings


@dataclass(frozen=True)
class Deadline:
    """A moment on the event loop's clock, and the limit that it comes from, as a noun phrase (`INIT's 120 s`)."""

    at: float
    limit: str
    of_attempt: bool = False  # the limit is that of the whole attempt

    @classmethod
    def after(cls, seconds: float, limit: str, *, of_attempt: bool = False) -> Deadline:
        return cls(asyncio.get_running_loop().time() + seconds, limit, of_attempt)

    @property
    def left(self) -> float:
        """Seconds until it strikes; 0 afterwards."""
        return max(0.0, self.at - asyncio.get_running_loop().time())

    def error(self, what: str = "") -> StageTimedOut | AttemptTimedOut:
        """What to raise once it has struck. `what` says what was going on."""
        message = f"{self.limit} ran out" + (f" while {what}" if what else "")
        return AttemptTimedOut(message) if self.of_attempt else StageTimedOut(message)


def stage_deadline(timeouts: TimeoutSettings, stage: Stage, *, held_before: float) -> Deadline:
    """The nearest of the limits on a stage that begins now.

    `held_before` is how many seconds workers have held this attempt in earlier stages; waiting between them does not count.
    """
    seconds = {Stage.INIT: timeouts.init, Stage.RUN: timeouts.agent, Stage.EVAL: timeouts.eval}[stage]
    names = {Stage.INIT: "INIT's", Stage.RUN: "the agent's", Stage.EVAL: "EVAL's"}
    own = Deadline.after(seconds, f"{names[stage]} {seconds:g} s")
    if timeouts.attempt is None:
        return own
    whole = Deadline.after(timeouts.attempt - held_before, f"the attempt's {timeouts.attempt:g} s", of_attempt=True)
    return min(own, whole, key=lambda deadline: deadline.at)
