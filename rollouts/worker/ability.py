"""Whether this node can start sandboxes: looked at before its INIT worker takes anything, and said on the node's row.

A start that shows that it cannot any more, for a full disk perhaps, is such a look, too: a node where every start fails at once
would else take more rollouts than any other, and fail them all.
"""

from __future__ import annotations

import asyncio

import structlog

from rollouts.services.nodes import note_no_sandboxes, note_sandboxes
from sandboxes.errors import BackendUnavailable
from sandboxes.protocol import Backend

from .database import Database

logger = structlog.get_logger(__name__)

_BETWEEN_LOOKS = 60.0


class Ability:
    """One per INIT worker process. While `problem` is not empty, the process should take no work."""

    def __init__(self, *, database: Database, backend: Backend, node: str) -> None:
        self._database = database
        self._backend = backend
        self._node = node
        self.problem = ""
        self._new_problem = asyncio.Event()

    async def look(self) -> None:
        """Probe the backend and record the result."""
        try:
            facts = await self._backend.probe()
        except BackendUnavailable as error:
            await self.note(error)
            return
        if self.problem:
            logger.info("sandboxes can be started again", backend=self._backend.name)
        self.problem = ""
        await self._database.insist(note_sandboxes, node=self._node, backend=self._backend.name, facts=facts)

    async def note(self, error: BackendUnavailable) -> None:
        """Take no work until somebody has put it right, or at least until the next look."""
        self.problem = str(error)
        self._new_problem.set()
        logger.error("no sandbox can be started here; taking no work", backend=self._backend.name, problem=self.problem)
        await self._database.insist(note_no_sandboxes, node=self._node, backend=self._backend.name, problem=self.problem)

    async def keep_looking(self) -> None:
        """Look again and again while there is a problem, for ever."""
        while True:
            await self._new_problem.wait()
            await asyncio.sleep(_BETWEEN_LOOKS)
            self._new_problem.clear()
            await self.look()
