"""One worker process of one stage: its loop, its lease, and the rollouts it has in hand."""

from __future__ import annotations

import asyncio
import enum
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import OperationalError

from prorl_site import logs
from rollouts.engine.errors import classify, stuck
from rollouts.lifecycle import PHASES, Stage
from rollouts.llm.client import ModelClient
from rollouts.llm.route import Overtaken
from rollouts.models import Draining
from rollouts.services.claim import Claim, claim_rollouts
from rollouts.services.finish import GivenBack, fail, finish_cancelled
from rollouts.services.lease import (
    Heartbeat,
    announce_drain,
    deregister_worker,
    give_back_forgotten,
    register_worker,
    renew,
)
from sandboxes.errors import BackendUnavailable
from sandboxes.protocol import Backend
from sandboxes.registry import get_backend

from .ability import Ability
from .database import Database
from .fleet import FleetView
from .janitor import Janitor
from .rescoring import Rescorer
from .sandboxes import Sandboxes
from .stages import CARRY_OUT, Tools
from .writes import Writes

logger = structlog.get_logger(__name__)

# How long a stopping worker waits for its rollouts to be handed back.
_DRAIN_SECONDS = 3.0
# How long it then waits for its own tasks.
_GOODBYE_SECONDS = 1.0
# An EVAL worker scores finished rollouts again on one extra slot for so many ordinary ones.
_RESCORING_SHARE = 4


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


class WorkerProcess:
    """Carries out rollouts until it is stopped. Threads call `take` and `stop`; everything else runs on the loop."""

    def __init__(self, *, stage: Stage, node: str, concurrency: int) -> None:
        self.stage = stage
        self.node = node
        self.concurrency = concurrency
        self._id: UUID | None = None
        self._held: dict[tuple[UUID, int], Held] = {}
        self._takes: set[asyncio.Task[None]] = set()
        self._claiming: Counter[UUID] = Counter()
        self._forgotten: set[tuple[UUID, int]] = set()
        self._missed: set[tuple[UUID, int]] = set()
        self._draining = False  # takes nothing new: it will end
        self._ending = False  # at once
        self._node_drains = False  # until its node is resumed
        self._ability: Ability | None = None  # of INIT workers
        self._slots = asyncio.Semaphore(concurrency)
        self._database = Database(patience=settings.LEASE_SECONDS)
        # However long the work waits for the database or the blob storage: the lease does not wait behind it, nor do cancels.
        self._lease = Database(patience=settings.LEASE_SECONDS, threads=1)
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
        fleet = FleetView(self._database, owner=lambda: self._id)
        self._tools = Tools(database=self._database, writes=writes, models=ModelClient(), sandboxes=sandboxes, fleet=fleet)
        await self._register()
        self._background.append(self._loop.create_task(self._keep_lease()))
        if self.stage is Stage.INIT:
            self._ability = Ability(database=self._database, backend=backend, node=self.node)
            await self._ability.look()
            self._background.append(self._loop.create_task(self._ability.keep_looking()))
            janitor = Janitor(database=self._database, backend=backend, node=self.node)
            self._background.append(self._loop.create_task(janitor.run()))
            warm = sandboxes.keep_warm(lambda: None if self._refuses else self._id)
            self._background.append(self._loop.create_task(warm))
        if self.stage is Stage.RUN:
            self._background.append(self._loop.create_task(fleet.run()))
        if self.stage is Stage.EVAL:
            slots = max(1, self.concurrency // _RESCORING_SHARE)
            rescorer = Rescorer(self._tools, slots=slots, owner=lambda: None if self._refuses else self._id)
            self._background.append(self._loop.create_task(rescorer.run()))

    async def _register(self) -> None:
        self._id = await self._lease.insist(
            register_worker, node=self.node, stage=self.stage, pid=os.getpid(), concurrency=self.concurrency
        )

    @property
    def _refuses(self) -> bool:
        unable = self._ability is not None and self._ability.problem
        return bool(self._draining or self._node_drains or self._id is None or unable)

    async def _drain(self, done: Callable[[], None]) -> None:
        self._draining = True
        try:
            async with asyncio.timeout(settings.DRAIN_SECONDS):
                if self._id is not None:
                    await self._database.insist(announce_drain, worker_id=self._id)
                while self._held:
                    await asyncio.wait([held.task for held in self._held.values()])
        except TimeoutError:
            logger.warning("handing back what did not finish in time", worker=self._id, held=len(self._held))
        finally:
            done()

    async def _end(self) -> None:
        self._draining = self._ending = True
        for task in self._background:
            task.cancel()
        for held in self._held.values():
            held.interrupt(Interruption.DRAINING)
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while in_hand := [*self._takes, *(held.task for held in self._held.values())]:
                    await asyncio.wait(in_hand)
        except TimeoutError:
            logger.warning("stopping with rollouts in hand; the rescuer takes them back", held=len(self._held))
            for take in self._takes:
                take.cancel()  # or its thread would wait for ever
        # Warm sandboxes are stopped now; what takes too long is left to the next janitor.
        await asyncio.wait(self._background, timeout=_GOODBYE_SECONDS)
        if self._id is not None:
            await self._database.call(deregister_worker, worker_id=self._id)
        await self._tools.models.close()

    # --- One rollout -------------------------------------------------------------------------------------------------------

    async def _take(self, waiting: list[UUID]) -> None:
        """Whoever is not claimed here is not lost: the dispatcher hints again."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        self._takes.add(task)
        task.add_done_callback(self._takes.discard)
        while waiting and not self._refuses and (slots := await self._free_slots(len(waiting))):
            hinted, waiting = waiting[:slots], waiting[slots:]
            claimed: list[Claim] = []
            self._claiming.update(hinted)
            try:
                if (owner := self._id) is not None and not self._refuses:
                    claimed = await self._database.call(
                        claim_rollouts, stage=self.stage, rollout_ids=hinted, owner=owner, node=self.node
                    )
            finally:
                self._claiming -= Counter(hinted)
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
        if self._ending:  # stop() came while the claim was made
            held.interrupt(Interruption.DRAINING)

    async def _hold(self, claimed: Claim) -> None:
        key = claimed.rollout_id, claimed.attempt
        held = self._held[key]
        ids = {"rollout": claimed.rollout_id, "attempt": claimed.attempt, "run": claimed.run_id, "project": claimed.project_id}
        with logs.bound(**ids, node=self.node, stage=self.stage.value, worker=self._id):
            try:
                await self._carry_through(claimed, held)
            except Exception:
                logger.exception("could not store how the stage ended")
            finally:
                if self._held.get(key) is held:  # EVAL may have been taken away and given back to us meanwhile
                    del self._held[key]
                self._slots.release()

    async def _carry_through(self, claimed: Claim, held: Held) -> None:
        """Everything that can go wrong in a stage ends here, once, as data."""
        begun = self._loop.time()
        try:
            await CARRY_OUT[self.stage](self._tools, claimed)
            logger.info("stage ended", seconds=round(self._loop.time() - begun, 3))
        except asyncio.CancelledError:
            await self._after_interruption(claimed, held.interruption)
        except Overtaken as error:
            await self._tools.writes.given_back(GivenBack(claimed, str(error)))
        except Exception as error:
            failure = classify(error, PHASES[self.stage])
            why = failure.termination
            logger.warning("stage failed", cause=why.cause.value, detail=why.detail, retryable=failure.retryable)
            await self._database.insist(fail, claim=claimed, failure=failure)
            if self._ability is not None and isinstance(error, BackendUnavailable):
                await self._ability.note(error)

    async def _after_interruption(self, claimed: Claim, why: Interruption | None) -> None:
        if why is Interruption.CANCELLED:
            await self._database.insist(
                finish_cancelled, ids=[claimed.rollout_id], guard=claimed.guard, phase=PHASES[self.stage], stage=self.stage
            )
        elif why in (Interruption.DRAINING, Interruption.NODE_DRAINS):
            await self._tools.writes.given_back(GivenBack(claimed, why.value))
        elif why is Interruption.STUCK:
            await self._database.insist(fail, claim=claimed, failure=stuck(PHASES[self.stage]))
        elif why is None:
            raise  # not ours: the loop itself is being torn down

    # --- The lease ---------------------------------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(settings.HEARTBEAT_SECONDS)
            try:
                await self._renew_once()
            except OperationalError as error:
                logger.warning("lease not renewed; trying again", worker=self._id, error=str(error))
            except Exception:
                logger.exception("lease not renewed; trying again", worker=self._id, seconds=settings.HEARTBEAT_SECONDS)

    async def _renew_once(self) -> None:
        assert self._id is not None  # noqa: S101 - registered before the loop starts
        known = set(self._held)
        beat = await self._lease.call(renew, worker_id=self._id)
        if not beat.alive:
            logger.warning("declared lost; dropping what is held and starting over", worker=self._id, held=len(self._held))
            for held in self._held.values():
                held.interrupt(Interruption.LOST)
            await self._register()
            return
        for key, asked in beat.held.items():
            if key in self._held and asked.cancel_asked:
                self._held[key].interrupt(Interruption.CANCELLED)
            elif key in self._held and asked.stuck:
                self._held[key].interrupt(Interruption.STUCK)
        self._follow_node(beat.draining)
        self._drop_what_was_taken_away(beat, known)
        await self._give_back_forgotten(beat, known)

    def _follow_node(self, draining: Draining) -> None:
        """What runs on a draining node is still evaluated there: its sandbox may be needed."""
        self._node_drains = draining is Draining.OVER or (draining is Draining.FINISHING and self.stage is not Stage.EVAL)
        if draining is Draining.OVER:
            for held in self._held.values():
                held.interrupt(Interruption.NODE_DRAINS)

    def _drop_what_was_taken_away(self, beat: Heartbeat, known: set[tuple[UUID, int]]) -> None:
        """Rollouts we have in hand, and the database says we do not: the rescuer took them from us.

        Seen in two heartbeats in a row, so that one whose final write is just being answered is not mistaken for one.
        """
        missed = known - set(beat.held)
        for key in missed & self._missed & set(self._held):
            self._held[key].interrupt(Interruption.LOST)
        self._missed = missed

    async def _give_back_forgotten(self, beat: Heartbeat, known: set[tuple[UUID, int]]) -> None:
        """Rollouts the database says we hold, and we do not: the claim's answer or the final write never came through.

        Seen in two heartbeats in a row, so that a write that is just being answered is not mistaken for one.
        """
        missing = {key for key in beat.held.keys() - known - self._held.keys() if not self._claiming[key[0]]}
        if again := missing & self._forgotten:
            assert self._id is not None  # noqa: S101
            logger.warning("giving back rollouts that this worker lost track of", worker=self._id, number=len(again))
            await self._database.call(give_back_forgotten, worker_id=self._id, stage=self.stage, rollouts=sorted(again))
        self._forgotten = missing
