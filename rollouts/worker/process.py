"""One worker process of one stage: its loop, its lease, and the rollouts it has in hand."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.conf import settings

from rollouts.engine.errors import classify
from rollouts.lifecycle import PHASES, Stage
from rollouts.llm.client import ModelClient
from rollouts.services.claim import Claim, claim_rollouts
from rollouts.services.finish import fail, finish_cancelled, hand_back
from rollouts.services.lease import Heartbeat, deregister_worker, give_back_forgotten, register_worker, renew
from sandboxes.protocol import Backend
from sandboxes.registry import get_backend

from .database import Database
from .janitor import Janitor
from .stages import CARRY_OUT, Tools
from .writes import Writes

logger = logging.getLogger(__name__)

# How long a stopping worker waits for its rollouts to be handed back.
_DRAIN_SECONDS = 3.0


class Interruption(enum.Enum):
    """Why the worker cancels one of its own coroutines."""

    CANCELLED = "cancelled"
    DRAINING = "the worker is stopping"
    LOST = "the lease ran out"


@dataclass
class Held:
    """A claimed rollout in the hands of this process."""

    task: asyncio.Task[None]
    interruption: Interruption | None = None

    def interrupt(self, why: Interruption) -> None:
        if self.interruption is None:
            self.interruption = why
            self.task.cancel()


class WorkerProcess:
    """Carries out rollouts until it is stopped. Threads call `take` and `stop`; everything else runs on the loop."""

    def __init__(self, *, stage: Stage, node: str, concurrency: int) -> None:
        self.stage = stage
        self.node = node
        self.concurrency = concurrency
        self._id: UUID | None = None
        self._held: dict[tuple[UUID, int], Held] = {}
        self._forgotten: set[tuple[UUID, int]] = set()
        self._draining = False
        self._slots = asyncio.Semaphore(concurrency)
        self._database = Database(patience=settings.LEASE_SECONDS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._background: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Register and begin to renew the lease. Raises when the database does not answer."""
        self._thread.start()
        self._submit(self._begin()).result()

    def take(self, rollout_ids: Sequence[UUID]) -> None:
        """Claim rollouts and carry them through this stage; returns when all have a slot here, or it is not worth waiting."""
        self._submit(self._take(list(rollout_ids))).result()

    def stop(self) -> None:
        """Hand everything back, say goodbye, end the loop. Bounded in time."""
        self._submit(self._end()).result(_DRAIN_SECONDS * 2)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        self._database.close()

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _begin(self) -> None:
        backend: Backend = get_backend(settings.SANDBOX_BACKEND, settings.SANDBOX_DIR)
        writes = Writes(self._database)
        self._tools = Tools(database=self._database, writes=writes, models=ModelClient(), backend=backend, node=self.node)
        await self._register()
        self._background.append(self._loop.create_task(self._keep_lease()))
        if self.stage is Stage.INIT:
            janitor = Janitor(database=self._database, backend=backend, node=self.node)
            self._background.append(self._loop.create_task(janitor.run()))

    async def _register(self) -> None:
        self._id = await self._database.insist(
            register_worker, node=self.node, stage=self.stage, pid=os.getpid(), concurrency=self.concurrency
        )

    async def _end(self) -> None:
        self._draining = True
        for task in self._background:
            task.cancel()
        for held in self._held.values():
            held.interrupt(Interruption.DRAINING)
        if self._held:
            await asyncio.wait([held.task for held in self._held.values()], timeout=_DRAIN_SECONDS)
        if self._id is not None:
            await self._database.call(deregister_worker, worker_id=self._id)
        await self._tools.models.close()

    # --- One rollout -------------------------------------------------------------------------------------------------------

    async def _take(self, waiting: list[UUID]) -> None:
        """Whoever is not claimed here is not lost: the dispatcher hints again."""
        while waiting and not self._draining and (slots := await self._free_slots(len(waiting))):
            hinted, waiting = waiting[:slots], waiting[slots:]
            claimed: list[Claim] = []
            try:
                if self._id is not None and not self._draining:
                    owner = self._id
                    claimed = await self._database.call(
                        claim_rollouts, stage=self.stage, rollout_ids=hinted, owner=owner, node=self.node
                    )
            finally:
                for _ in range(slots - len(claimed)):
                    self._slots.release()
            for claim in claimed:
                self._begin_work(claim)

    async def _free_slots(self, wanted: int) -> int:
        """Wait for one slot, take as many more as are free and wanted. None after the time in which a hint becomes void."""
        try:
            async with asyncio.timeout(settings.HINT_TIMEOUT_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            return 0
        taken = 1
        while taken < wanted and not self._slots.locked():
            await self._slots.acquire()
            taken += 1
        return taken

    def _begin_work(self, claim: Claim) -> None:
        held = Held(self._loop.create_task(self._hold(claim)))
        self._held[claim.rollout_id, claim.attempt] = held
        if self._draining:  # stop() came while the claim was made
            held.interrupt(Interruption.DRAINING)

    async def _hold(self, claimed: Claim) -> None:
        try:
            await self._carry_through(claimed)
        except Exception:
            logger.exception("rollout %s attempt %d: could not store how it ended", claimed.rollout_id, claimed.attempt)
        finally:
            self._held.pop((claimed.rollout_id, claimed.attempt), None)
            self._slots.release()

    async def _carry_through(self, claimed: Claim) -> None:
        """Everything that can go wrong in a stage ends here, once, as data."""
        try:
            await CARRY_OUT[self.stage](self._tools, claimed)
        except asyncio.CancelledError:
            await self._after_interruption(claimed)
        except Exception as error:
            failure = classify(error, PHASES[self.stage])
            logger.warning("rollout %s attempt %d: %s", claimed.rollout_id, claimed.attempt, failure.termination.detail)
            await self._database.insist(fail, claim=claimed, failure=failure)

    async def _after_interruption(self, claimed: Claim) -> None:
        why = self._held[claimed.rollout_id, claimed.attempt].interruption
        if why is Interruption.CANCELLED:
            await self._database.insist(
                finish_cancelled, ids=[claimed.rollout_id], guard=claimed.guard, phase=PHASES[self.stage], stage=self.stage
            )
        elif why is Interruption.DRAINING:
            await self._database.insist(
                hand_back, rollout_id=claimed.rollout_id, guard=claimed.guard, stage=self.stage, reason=why.value
            )
        elif why is None:
            raise  # not ours: the loop itself is being torn down

    # --- The lease ---------------------------------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(settings.HEARTBEAT_SECONDS)
            try:
                await self._renew_once()
            except Exception:
                logger.exception("could not renew the lease; trying again in %.1f s", settings.HEARTBEAT_SECONDS)

    async def _renew_once(self) -> None:
        assert self._id is not None  # noqa: S101 - registered before the loop starts
        known = set(self._held)
        beat = await self._database.call(renew, worker_id=self._id)
        if not beat.alive:
            logger.warning("this worker was declared lost; dropping %d rollouts and starting over", len(self._held))
            for held in self._held.values():
                held.interrupt(Interruption.LOST)
            await self._register()
            return
        for key, cancel_asked in beat.held.items():
            if cancel_asked and key in self._held:
                self._held[key].interrupt(Interruption.CANCELLED)
        await self._give_back_forgotten(beat, known)

    async def _give_back_forgotten(self, beat: Heartbeat, known: set[tuple[UUID, int]]) -> None:
        """Rollouts the database says we hold, and we do not: the claim's answer or the final write never came through.

        Seen in two heartbeats in a row, so that a claim on its way is not mistaken for one.
        """
        missing = set(beat.held) - known - set(self._held)
        if again := missing & self._forgotten:
            assert self._id is not None  # noqa: S101
            logger.warning("giving back %d rollouts that this worker lost track of", len(again))
            await self._database.call(give_back_forgotten, worker_id=self._id, stage=self.stage, rollouts=sorted(again))
        self._forgotten = missing
