"""One worker process of one stage: its loop, its slots, and how it begins and ends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings

from rollouts.lifecycle import Stage
from rollouts.llm.client import ModelClient
from rollouts.services.claim import Claim, claim_rollouts
from rollouts.services.lease import announce_drain
from sandboxes.protocol import Backend
from sandboxes.registry import get_backend

from .ability import Ability
from .database import Database
from .fleet import FleetView
from .hands import Hands, Interruption
from .janitor import Janitor
from .lease import Lease
from .rescoring import Rescorer
from .sandboxes import Sandboxes
from .stages import Tools
from .writes import Writes

logger = structlog.get_logger(__name__)

# How long a stopping worker waits for its rollouts to be handed back.
_DRAIN_SECONDS = 3.0
# How long it then waits for its own tasks.
_GOODBYE_SECONDS = 1.0
# An EVAL worker scores finished rollouts again on one extra slot for so many ordinary ones.
_RESCORING_SHARE = 4


class WorkerProcess:
    """Carries out rollouts until it is stopped. Threads call `take` and `stop`; everything else runs on the loop."""

    def __init__(self, *, stage: Stage, node: str, concurrency: int) -> None:
        self.stage = stage
        self.node = node
        self.concurrency = concurrency
        self._takes: set[asyncio.Task[None]] = set()
        self._draining = False  # takes nothing new: it will end
        self._ending = False  # at once
        self._ability: Ability | None = None  # of INIT workers
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
        if not self._ending:  # else the loop may be gone; the dispatcher hints again
            self._submit(self._take(list(rollout_ids))).result()

    def drain(self, done: Callable[[], None]) -> None:
        """Take nothing new, let what is held finish within `DRAIN_SECONDS`, then call `done` on the loop's thread."""
        self._submit(self._drain(done))

    def stop(self) -> None:
        """Hand everything back, say goodbye, end the loop. Bounded in time."""
        self._submit(self._end()).result(_DRAIN_SECONDS * 2)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        self._database.close()
        self._lease.close()
        if not self._loop.is_running():
            self._loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _begin(self) -> None:
        backend: Backend = get_backend(settings.SANDBOX_BACKEND, settings.SANDBOX_DIR, settings.SANDBOX_OPTIONS)
        writes = Writes(self._database)
        sandboxes = Sandboxes(database=self._database, backend=backend, node=self.node)
        fleet = FleetView(self._database, owner=lambda: self._lease.owner)
        self._tools = Tools(database=self._database, writes=writes, models=ModelClient(), sandboxes=sandboxes, fleet=fleet)
        if self.stage is Stage.INIT:
            self._ability = Ability(database=self._database, backend=backend, node=self.node)
        self._hands = Hands(self._tools, self._ability, stage=self.stage, node=self.node, concurrency=self.concurrency)
        self._lease = Lease(self._hands, self._database, stage=self.stage, node=self.node, concurrency=self.concurrency)
        await self._lease.register()
        self._background.append(self._loop.create_task(self._lease.keep()))
        if self._ability is not None:
            await self._ability.look()
            self._background.append(self._loop.create_task(self._ability.keep_looking()))
            janitor = Janitor(database=self._database, backend=backend, node=self.node)
            self._background.append(self._loop.create_task(janitor.run()))
            warm = sandboxes.keep_warm(lambda: None if self._refuses else self._lease.owner)
            self._background.append(self._loop.create_task(warm))
        if self.stage is Stage.RUN:
            self._background.append(self._loop.create_task(fleet.run()))
        if self.stage is Stage.EVAL:
            slots = max(1, self.concurrency // _RESCORING_SHARE)
            rescorer = Rescorer(self._tools, slots=slots, owner=lambda: None if self._refuses else self._lease.owner)
            self._background.append(self._loop.create_task(rescorer.run()))

    @property
    def _refuses(self) -> bool:
        unable = self._ability is not None and self._ability.problem
        return bool(self._draining or self._lease.node_drains or self._lease.owner is None or unable)

    async def _drain(self, done: Callable[[], None]) -> None:
        self._draining = True
        try:
            async with asyncio.timeout(settings.DRAIN_SECONDS):
                if self._lease.owner is not None:
                    await self._database.insist(announce_drain, worker_id=self._lease.owner)
                while in_hand := self._hands.tasks:
                    await asyncio.wait(in_hand)
        except TimeoutError:
            logger.warning("handing back what did not finish in time", worker=self._lease.owner, held=len(self._hands.held))
        finally:
            done()

    async def _end(self) -> None:
        self._draining = self._ending = True
        for task in self._background:
            task.cancel()
        self._hands.interrupt_all(Interruption.DRAINING)
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while in_hand := [*self._takes, *self._hands.tasks]:
                    await asyncio.wait(in_hand)
        except TimeoutError:
            logger.warning("stopping with rollouts in hand; the rescuer takes them back", held=len(self._hands.held))
            for take in self._takes:
                take.cancel()  # or its thread would wait for ever
        # Warm sandboxes are stopped now; what takes too long is left to the next janitor.
        await asyncio.wait(self._background, timeout=_GOODBYE_SECONDS)
        await self._lease.give_up()
        await self._tools.models.close()

    async def _take(self, waiting: list[UUID]) -> None:
        """Whoever is not claimed here is not lost: the dispatcher hints again."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        self._takes.add(task)
        task.add_done_callback(self._takes.discard)
        while waiting and not self._refuses and (slots := await self._free_slots(len(waiting))):
            hinted, waiting = waiting[:slots], waiting[slots:]
            claimed: list[Claim] = []
            self._hands.claiming.update(hinted)
            try:
                if (owner := self._lease.owner) is not None and not self._refuses:
                    claimed = await self._database.call(
                        claim_rollouts, stage=self.stage, rollout_ids=hinted, owner=owner, node=self.node
                    )
            finally:
                self._hands.claiming -= Counter(hinted)
                for _ in range(slots - len(claimed)):
                    self._hands.slots.release()
            for claim in claimed:
                held = self._hands.take(claim)
                if self._ending:  # stop() came while the claim was made
                    held.interrupt(Interruption.DRAINING)

    async def _free_slots(self, wanted: int) -> int:
        """Wait for one slot, take as many more as are free and wanted. None after the time in which a hint becomes void."""
        try:
            async with asyncio.timeout(settings.HINT_TIMEOUT_SECONDS):
                await self._hands.slots.acquire()
        except TimeoutError:
            return 0
        taken = 1
        while taken < wanted and not self._hands.slots.locked():
            await self._hands.slots.acquire()
            taken += 1
        return taken
