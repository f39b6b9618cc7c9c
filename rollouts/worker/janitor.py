"""Stops the sandboxes of this node that no rollout needs: those of lost workers, old attempts and cancelled rollouts."""

from __future__ import annotations

import asyncio

import structlog

from rollouts.services.sandboxes import unneeded_sandboxes
from sandboxes.protocol import Backend
from sandboxes.services import note_stopped

from .database import Database

logger = structlog.get_logger(__name__)

_SECONDS = 5.0


class Janitor:
    """One per node, in its INIT worker."""

    def __init__(self, *, database: Database, backend: Backend, node: str) -> None:
        self._database = database
        self._backend = backend
        self._node = node

    async def run(self) -> None:
        """Sweep now and then, for ever."""
        while True:
            try:
                await self.sweep()
            except Exception:
                logger.exception("sandbox sweep failed; trying again", seconds=_SECONDS)
            await asyncio.sleep(_SECONDS)

    async def sweep(self) -> None:
        """One pass: rows whose rollout has moved on, and directories that have no row."""
        present = await self._backend.list()
        for name in await self._database.call(unneeded_sandboxes, node=self._node, present=present):
            try:
                await self._backend.stop(name)
                await self._database.call(note_stopped, name=name, reason="no rollout needs it")
                logger.info("stray sandbox stopped", sandbox=name)
            except Exception:
                logger.exception("sandbox not stopped; trying again", sandbox=name)
