"""The sandboxes of this node, as the stages use them: noted before they start, stopped whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from rollouts.engine.deadlines import Deadline
from rollouts.services.claim import Claim
from rollouts.services.rescoring import RescoringClaim
from sandboxes.protocol import Backend, SandboxSpec, Session
from sandboxes.services import note_ready, note_start

from .database import Database
from .teardown import tear_down

logger = structlog.get_logger(__name__)

# Starting many sandboxes at once makes each of them slow; this many at a time per process keep two cores busy.
_START_GATE = asyncio.Semaphore(4)


class Sandboxes:
    """One per worker process."""

    def __init__(self, *, database: Database, backend: Backend, node: str) -> None:
        self._database = database
        self._backend = backend
        self._node = node

    async def start(self, name: str, claim: Claim | RescoringClaim, spec: SandboxSpec, deadline: Deadline) -> None:
        """Start one that answers. The row comes first, so that a crash in between leaves something the janitor finds."""
        await self._database.insist(
            note_start,
            name=name,
            rollout_id=claim.rollout_id,
            attempt=claim.attempt,
            node=self._node,
            backend=self._backend.name,
        )
        try:
            async with asyncio.timeout_at(deadline.at), _START_GATE:
                info = await self._backend.start(name, spec)
        except TimeoutError as error:
            raise deadline.error("the sandbox started") from error
        await self._database.insist(note_ready, name=name, enforced=dict(info.enforced))

    @contextlib.asynccontextmanager
    async def session(self, name: str, spec: SandboxSpec | None) -> AsyncIterator[Session | None]:
        """A connection to a running sandbox; None when the task has none. Raises `SandboxLost`."""
        if spec is None:
            yield None
            return
        session = await self._backend.connect(name)
        try:
            yield session
        finally:
            await session.close()

    async def stop(self, name: str, reason: str) -> None:
        """Also when this coroutine was cancelled. What fails here is left to the janitor, which tries again and reports."""

        async def stop() -> None:
            try:
                await tear_down(self._database, self._backend, name, reason)
            except Exception:
                logger.exception("what became of a sandbox is not recorded; left to the janitor", sandbox=name)

        await asyncio.shield(asyncio.get_running_loop().create_task(stop()))
