"""The way of one rollout among the LLM servers of its policy."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

import structlog
from django.conf import settings
from django.db import InterfaceError, OperationalError

from rollouts.llm.errors import ModelError
from rollouts.llm.route import CallCut, NoServer
from rollouts.llm.types import ServerAddress
from rollouts.models import LLMServer
from rollouts.services.assign import SLACK, SeenServer

if TYPE_CHECKING:
    from .fleet import FleetView

logger = structlog.get_logger(__name__)

# A rollout asks so rarely whether it should go to a server that is less busy; varied, so that not all of them ask at once.
BALANCE_SECONDS = (5.0, 15.0)
CALLED = (LLMServer.Admission.OPEN, LLMServer.Admission.DRAINING)  # servers that calls may go to

_WELL = (LLMServer.Health.LIVE, LLMServer.Health.RECOVERING)


class Seat(Protocol):
    """A rollout that runs in the hands of this process: a `Claim` of RUN, or what a gateway knows of a session.

    `server` is the one it was given when it was taken; `required_version` the only policy version it may be sampled from.
    """

    @property
    def rollout_id(self) -> UUID: ...
    @property
    def attempt(self) -> int: ...
    @property
    def owner(self) -> UUID: ...
    @property
    def policy_id(self) -> UUID: ...
    @property
    def server(self) -> ServerAddress | None: ...
    @property
    def required_version(self) -> int | None: ...


class FleetRoute:
    """Implements `rollouts.llm.route.Route`. Stays on its server until that cannot be used, or is far busier than another."""

    def __init__(self, view: FleetView, seat: Seat, address: ServerAddress) -> None:
        self.seat = seat
        self.server_id = UUID(address.server_id)
        self._view = view
        self._address = address
        self._failed: dict[UUID, int] = {}  # where a call of this rollout failed, and in which round of the view
        self._balance_at = self._later()
        self._is_placed = True  # False: the database may have moved it, and its answer was lost

    @property
    def server(self) -> ServerAddress:
        if seen := self._view.seen(self.server_id):
            self._address = seen.address
        return self._address

    @property
    def only_version(self) -> int | None:
        return self.seat.required_version

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[ServerAddress]:
        server = await self._usable()
        try:
            async with self._view.calling(server):
                yield server.address
        except CallCut:
            raise
        except ModelError as error:
            if error.retryable:
                self._failed[server.id] = self._view.round
                self._view.report(server, error)
            raise
        self._failed.pop(server.id, None)

    async def _usable(self) -> SeenServer:
        """The server for the next call. Waits for a pause or an update however long it takes: the rollout's deadline counts.

        For one that is dead or gone, with no other to go to, it waits `SERVER_WAIT_SECONDS`. Raises `NoServer`.
        """
        loop = asyncio.get_running_loop()
        patience: float | None = None
        while True:
            self._forgive()
            if not self._is_placed:
                # Where it really is, holds ask for its calls. Nothing could be stored meanwhile either.
                await self._view.next_look()
                await self._move(set())
                continue
            mine = self._view.seen(self.server_id)
            problem = self._problem(mine)
            if mine is not None and not problem:
                if not self._should_balance(mine):
                    return mine
                await self._move(set())
                continue  # a hold may have come meanwhile
            held = mine is not None and bool(mine.hold)
            if not held and self._view.others(self) and await self._move({self.server_id}):
                continue
            if held or (mine is not None and mine.admission not in CALLED):
                patience = None
                await self._view.next_look()
                continue
            patience = patience or loop.time() + settings.SERVER_WAIT_SECONDS
            try:
                async with asyncio.timeout_at(patience):
                    await self._view.next_look()
            except TimeoutError:
                waited = f"no other took its place within {settings.SERVER_WAIT_SECONDS:g} s"
                raise NoServer(f"{self.server.url} {problem}, and {waited}") from None

    def _problem(self, server: SeenServer | None) -> str:
        """Why no call can be made there now; empty when one can."""
        if server is None:
            return "was removed"
        if server.hold:
            return "loads new weights"
        if server.admission not in CALLED:
            return f"is {server.admission}"
        if server.health == LLMServer.Health.DEAD:
            return "is dead"
        version = self.seat.required_version
        if version is not None and version != server.address.policy_version:
            return f"serves version {server.address.policy_version} and not {version}"
        if server.id in self._failed:
            return "failed a call"
        return ""

    def _forgive(self) -> None:
        """The look that followed the report tells whether it was one call or the server."""
        for server_id, failed in list(self._failed.items()):
            seen = self._view.seen(server_id)
            if self._view.round > failed + 1 and (seen is None or seen.health in _WELL):
                del self._failed[server_id]

    def _should_balance(self, mine: SeenServer) -> bool:
        loop = asyncio.get_running_loop()
        if loop.time() < self._balance_at or mine.room is None:
            return False
        self._balance_at = self._later()
        return any((mine.running - 1) / mine.room - other.used > SLACK for other in self._view.others(self))

    async def _move(self, avoid: set[UUID]) -> bool:
        self._is_placed = False
        try:
            chosen = await self._view.move(self, avoid | set(self._failed))
        except (OperationalError, InterfaceError) as error:
            logger.warning("no other LLM server chosen; trying again", error=str(error))
            return False
        self._is_placed = True
        if chosen is None or chosen == self.server_id:
            return False
        logger.info("rollout goes on at another LLM server", server=str(chosen), before=str(self.server_id))
        self.server_id = chosen
        return True

    @staticmethod
    def _later() -> float:
        return asyncio.get_running_loop().time() + random.uniform(*BALANCE_SECONDS)  # noqa: S311 - no secret
