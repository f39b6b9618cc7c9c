"""The rollouts in the hands of one worker process: how each is carried through its stage, interrupted, and let go of."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from dataclasses import dataclass
from uuid import UUID

import structlog

from prorl_site import logs
from rollouts.engine.errors import classify, stuck
from rollouts.lifecycle import PHASES, Stage
from rollouts.llm.route import Overtaken
from rollouts.services.claim import Claim
from rollouts.services.finish import GivenBack, fail, finish_cancelled
from sandboxes.errors import BackendUnavailable

from .ability import Ability
from .stages import CARRY_OUT, Tools

logger = structlog.get_logger(__name__)

Key = tuple[UUID, int]  # a rollout and its attempt


class Interruption(enum.Enum):
    """Why the worker cancels one of its own coroutines."""

    CANCELLED = "cancelled"
    DRAINING = "the worker is stopping"
    NODE_DRAINS = "the node drains, and its deadline is past"
    STUCK = "far past its deadline"
    LOST = "the lease ran out"


@dataclass
class Held:
    """A claimed rollout in the hands of this process."""

    task: asyncio.Task[None]
    interruption: Interruption | None = None

    def interrupt(self, why: Interruption) -> None:
        if self.interruption is None:
            self.interruption = why
            # Not at once: a task that is cancelled before its first step never runs, so nothing would be handed back.
            self.task.get_loop().call_soon(self.task.cancel)


class Hands:
    """One per worker process, on its loop. A slot of `slots` is taken before a claim, and free again when the rollout has left.

    `claiming` counts the rollouts of claims whose answers are still on their way. `ability` is that of INIT workers.
    """

    def __init__(self, tools: Tools, ability: Ability | None, *, stage: Stage, node: str, concurrency: int) -> None:
        self.held: dict[Key, Held] = {}
        self.claiming: Counter[UUID] = Counter()
        self.slots = asyncio.Semaphore(concurrency)
        self._tools = tools
        self._ability = ability
        self._stage = stage
        self._node = node

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """One for each rollout that is held."""
        return [held.task for held in self.held.values()]

    def take(self, claim: Claim) -> Held:
        """Begin to carry a rollout through this stage, in a slot that was taken for it."""
        held = Held(asyncio.create_task(self._hold(claim)))
        self.held[claim.rollout_id, claim.attempt] = held
        return held

    def interrupt_all(self, why: Interruption) -> None:
        for held in self.held.values():
            held.interrupt(why)

    async def _hold(self, claimed: Claim) -> None:
        key = claimed.rollout_id, claimed.attempt
        held = self.held[key]
        ids = {"rollout": claimed.rollout_id, "attempt": claimed.attempt, "run": claimed.run_id, "project": claimed.project_id}
        with logs.bound(**ids, node=self._node, stage=self._stage.value, worker=claimed.owner):
            try:
                await self._carry_through(claimed, held)
            except Exception:
                logger.exception("could not store how the stage ended")
            finally:
                if self.held.get(key) is held:  # EVAL may have been taken away and given back to us meanwhile
                    del self.held[key]
                self.slots.release()

    async def _carry_through(self, claimed: Claim, held: Held) -> None:
        """Everything that can go wrong in a stage ends here, once, as data."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            await CARRY_OUT[self._stage](self._tools, claimed)
            logger.info("stage ended", seconds=round(loop.time() - begun, 3))
        except asyncio.CancelledError:
            await self._after_interruption(claimed, held.interruption)
        except Overtaken as error:
            await self._tools.writes.given_back(GivenBack(claimed, str(error)))
        except Exception as error:
            failure = classify(error, PHASES[self._stage])
            why = failure.termination
            logger.warning("stage failed", cause=why.cause.value, detail=why.detail, retryable=failure.retryable)
            await self._tools.database.insist(fail, claim=claimed, failure=failure)
            if self._ability is not None and isinstance(error, BackendUnavailable):
                await self._ability.note(error)

    async def _after_interruption(self, claimed: Claim, why: Interruption | None) -> None:
        if why is Interruption.CANCELLED:
            await self._tools.database.insist(
                finish_cancelled, ids=[claimed.rollout_id], guard=claimed.guard, phase=PHASES[self._stage], stage=self._stage
            )
        elif why in (Interruption.DRAINING, Interruption.NODE_DRAINS):
            await self._tools.writes.given_back(GivenBack(claimed, why.value))
        elif why is Interruption.STUCK:
            await self._tools.database.insist(fail, claim=claimed, failure=stuck(PHASES[self._stage]))
        elif why is None:
            raise  # not ours: the loop itself is being torn down
