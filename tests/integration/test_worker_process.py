"""What a worker process does with the rollouts in its hands, apart from carrying them out."""

from __future__ import annotations

import asyncio

from rollouts.worker.hands import Held, Interruption


async def test_a_rollout_interrupted_before_its_first_step_still_learns_why():
    learned = []

    async def carry_through() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            learned.append(held.interruption)

    held = Held(asyncio.create_task(carry_through()))
    held.interrupt(Interruption.DRAINING)
    held.interrupt(Interruption.LOST)  # comes too late
    await held.task
    assert learned == [Interruption.DRAINING]
