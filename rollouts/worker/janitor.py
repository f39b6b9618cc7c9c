"""Stops the sandboxes of this node that no rollout needs: those of lost workers, old attempts and cancelled rollouts."""

from __future__ import annotations

import asyncio

import structlog

from rollouts.services.sandboxes import abandon_sandboxes_of_lost_nodes, unneeded_sandboxes
from sandboxes.protocol import Backend

from .database import Database
from .teardown import tear_down

logger = structlog.get_logger(__name__)

_SECONDS = 5.0
_AT_ONCE = 8


class Janitor:
    """One per node, in its INIT worker."""

    def __init__(self, *, database: Database, backend: Backend, node: str) -> None:
        self._database = database
        self._backend = backend
        self._node = node

    async def run(self) -> None:
        """Sweep at once, what an earlier worker left behind, and then now and then, for ever."""
        while True:
            try:
                await self.sweep()
            except Exception:
                logger.exception("sandbox sweep failed; trying again", seconds=_SECONDS)
            await asyncio.sleep(_SECONDS)

    async def sweep(self) -> None:
        """One pass: rows whose rollout has moved on, and directories that have no row. A slow stop holds up no other."""
        present = await self._backend.list()
        unneeded = await self._database.call(unneeded_sandboxes, node=self._node, present=present)
        gate = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._stop(name, gate) for name in unneeded))
        if abandoned := await self._database.call(abandon_sandboxes_of_lost_nodes):
            logger.warning("sandboxes of nodes that never came back are given up", number=abandoned)

    async def _stop(self, name: str, gate: asyncio.Semaphore) -> None:
        async with gate:
            try:
                if await tear_down(self._database, self._backend, name, "no rollout needs it"):
                    logger.info("stray sandbox stopped", sandbox=name)
            except Exception:
                logger.exception("what became of a stray sandbox is not recorded; trying again", sandbox=name)
