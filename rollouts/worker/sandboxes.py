"""The sandboxes of this node, as the stages use them: noted before they start, stopped whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from uuid import UUID

import structlog

from rollouts.engine.deadlines import Deadline
from rollouts.services.claim import Claim
from rollouts.services.rescoring import RescoringClaim
from sandboxes.images.services.use import Usable, resolve_image
from sandboxes.network import open_network
from sandboxes.network.proxy import Refusal
from sandboxes.pool import WarmPool
from sandboxes.protocol import Backend, SandboxInfo, SandboxSpec, Session
from sandboxes.services import note_ready, note_start

from .database import Database
from .teardown import tear_down
from .warm import WarmLedger

logger = structlog.get_logger(__name__)


class Sandboxes:
    """One per worker process."""

    def __init__(self, *, database: Database, backend: Backend, node: str) -> None:
        self._database = database
        self._backend = backend
        self._node = node
        self._pool: WarmPool | None = None

    async def keep_warm(self, holder: Callable[[], UUID | None]) -> None:
        """Keep sandboxes started for rollouts to come, until cancelled. `holder` as in `WarmLedger`."""
        ledger = WarmLedger(database=self._database, backend=self._backend, node=self._node, holder=holder)
        self._pool = WarmPool(self._backend, ledger)
        await self._pool.run()

    async def start(self, name: str, claim: Claim | RescoringClaim, spec: SandboxSpec, deadline: Deadline) -> None:
        """Start one that answers. The row comes first, so that a crash in between leaves something the janitor finds."""
        image = await self._database.insist(resolve_image, spec.image)
        await self._database.insist(
            note_start,
            name=name,
            rollout_id=claim.rollout_id,
            attempt=claim.attempt,
            node=self._node,
            backend=self._backend.name,
            image=image.root.digest,
        )
        try:
            async with asyncio.timeout_at(deadline.at):
                info = await self._started(name, spec, image)
        except TimeoutError as error:
            raise deadline.error("the sandbox started") from error
        await self._database.insist(note_ready, name=name, enforced=info.enforced)

    async def _started(self, name: str, spec: SandboxSpec, image: Usable) -> SandboxInfo:
        if self._pool is not None:
            warm = await self._pool.take(name, spec, image.root, target=image.warm_target)
            if warm is not None:
                return warm
        return await self._backend.start(name, spec, image.root)

    @contextlib.asynccontextmanager
    async def session(self, name: str, spec: SandboxSpec | None) -> AsyncIterator[Session | None]:
        """A connection to a running sandbox, whose network policy holds meanwhile; None when the task has none.

        Raises `SandboxLost`.
        """
        if spec is None:
            yield None
            return
        session = await self._backend.connect(name)
        try:
            await open_network(session, spec.network, on_refusal=_log_refusal)
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


def _log_refusal(refusal: Refusal) -> None:
    if refusal.number <= 20 or refusal.number.bit_count() == 1:  # what runs inside may try it for ever
        logger.info("sandbox was refused a destination", **refusal._asdict())
