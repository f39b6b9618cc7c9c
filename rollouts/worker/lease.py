"""The lease of one worker process, which is that of all rollouts in its hands: kept, and what its heartbeats say obeyed."""

from __future__ import annotations

import asyncio
import os
from uuid import UUID

import structlog
from django.conf import settings
from django.db import OperationalError

from rollouts.lifecycle import Stage
from rollouts.models import Draining
from rollouts.services.lease import Heartbeat, deregister_worker, give_back_forgotten, register_worker, renew

from .database import Database
from .hands import Hands, Interruption, Key

logger = structlog.get_logger(__name__)


class Lease:
    """`owner` is the id under which the process is registered. While `node_drains`, it takes nothing new."""

    def __init__(self, hands: Hands, work: Database, *, stage: Stage, node: str, concurrency: int) -> None:
        self.owner: UUID | None = None
        self.node_drains = False  # until its node is resumed
        self._hands = hands
        self._work = work
        self._stage = stage
        self._node = node
        self._concurrency = concurrency
        # However long the work waits for the database or the blob storage: the lease does not wait behind it, nor do cancels.
        self._database = Database(patience=settings.LEASE_SECONDS, threads=1)
        self._forgotten: set[Key] = set()
        self._missed: set[Key] = set()

    async def register(self) -> None:
        """Take a lease, under a new id. Raises `StoreFailed` when the database does not answer."""
        self.owner = await self._database.insist(
            register_worker, node=self._node, stage=self._stage, pid=os.getpid(), concurrency=self._concurrency
        )

    async def give_up(self) -> None:
        """Say goodbye, having handed back what was held."""
        if self.owner is not None:
            await self._work.call(deregister_worker, worker_id=self.owner)

    def close(self) -> None:
        """No more calls of the database."""
        self._database.close()

    async def keep(self) -> None:
        """Renew it, until cancelled."""
        while True:
            await asyncio.sleep(settings.HEARTBEAT_SECONDS)
            try:
                await self._renew_once()
            except OperationalError as error:
                logger.warning("lease not renewed; trying again", worker=self.owner, error=str(error))
            except Exception:
                logger.exception("lease not renewed; trying again", worker=self.owner, seconds=settings.HEARTBEAT_SECONDS)

    async def _renew_once(self) -> None:
        assert self.owner is not None  # noqa: S101 - registered before the loop starts
        known = set(self._hands.held)
        beat = await self._database.call(renew, worker_id=self.owner)
        if not beat.alive:
            logger.warning(
                "declared lost; dropping what is held and starting over", worker=self.owner, held=len(self._hands.held)
            )
            self._hands.interrupt_all(Interruption.LOST)
            await self.register()
            return
        for key, asked in beat.held.items():
            if key in self._hands.held and asked.cancel_asked:
                self._hands.held[key].interrupt(Interruption.CANCELLED)
            elif key in self._hands.held and asked.stuck:
                self._hands.held[key].interrupt(Interruption.STUCK)
        self._follow_node(beat.draining)
        self._drop_what_was_taken_away(beat, known)
        await self._give_back_forgotten(beat, known)

    def _follow_node(self, draining: Draining) -> None:
        """What runs on a draining node is still evaluated there: its sandbox may be needed."""
        self.node_drains = draining is Draining.OVER or (draining is Draining.FINISHING and self._stage is not Stage.EVAL)
        if draining is Draining.OVER:
            self._hands.interrupt_all(Interruption.NODE_DRAINS)

    def _drop_what_was_taken_away(self, beat: Heartbeat, known: set[Key]) -> None:
        """Rollouts we have in hand, and the database says we do not: the rescuer took them from us.

        Seen in two heartbeats in a row, so that one whose final write is just being answered is not mistaken for one.
        """
        missed = known - set(beat.held)
        for key in missed & self._missed & set(self._hands.held):
            self._hands.held[key].interrupt(Interruption.LOST)
        self._missed = missed

    async def _give_back_forgotten(self, beat: Heartbeat, known: set[Key]) -> None:
        """Rollouts the database says we hold, and we do not: the claim's answer or the final write never came through.

        Seen in two heartbeats in a row, so that a write that is just being answered is not mistaken for one.
        """
        missing = {key for key in beat.held.keys() - known - self._hands.held.keys() if not self._hands.claiming[key[0]]}
        if again := missing & self._forgotten:
            assert self.owner is not None  # noqa: S101
            logger.warning("giving back rollouts that this worker lost track of", worker=self.owner, number=len(again))
            await self._work.call(give_back_forgotten, worker_id=self.owner, stage=self._stage, rollouts=sorted(again))
        self._forgotten = missing
