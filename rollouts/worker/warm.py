"""Notes what the warm pool of an INIT worker process starts and stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from uuid import UUID

from sandboxes.errors import SandboxError
from sandboxes.protocol import Backend
from sandboxes.services import note_ready, note_stopped, note_warm_start, release_warm

from .database import Database


class WarmLedger:
    """Implements `sandboxes.pool.Ledger`. `holder` gives the worker process's id, None while it takes nothing new."""

    def __init__(self, *, database: Database, backend: Backend, node: str, holder: Callable[[], UUID | None]) -> None:
        self._database = database
        self._backend = backend
        self._node = node
        self._holder = holder

    async def started(self, name: str, image: str) -> None:
        """Raises SandboxError while the worker takes nothing new."""
        if (holder := self._holder()) is None:
            raise SandboxError("the worker takes nothing new")
        await self._database.insist(
            note_warm_start, name=name, holder=holder, node=self._node, backend=self._backend.name, image=image
        )

    async def ready(self, name: str, enforced: Mapping[str, str]) -> None:
        await self._database.insist(note_ready, name=name, enforced=enforced)

    async def released(self, name: str) -> None:
        await self._database.call(release_warm, name=name)

    async def stopped(self, name: str, reason: str) -> None:
        await self._database.call(note_stopped, name=name, reason=reason)
