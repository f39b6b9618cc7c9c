"""What one process knows of the LLM servers that its rollouts call."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from uuid import UUID

import structlog
from django.db import InterfaceError, OperationalError

from rollouts.llm.errors import ModelError
from rollouts.llm.route import CallCut
from rollouts.models import LLMServer
from rollouts.services.assign import SeenServer, move_rollout, see_servers
from rollouts.services.holds import note_quiet
from rollouts.services.server_health import note_failed_calls

from .database import Database
from .fleet_route import CALLED, FleetRoute, Seat

logger = structlog.get_logger(__name__)

_LOOK_SECONDS = 1.0
_SHORTEST_LOOK_SECONDS = 0.1  # however much fails


class FleetView:
    """One per process. Looks once a second at the servers of the policies in hand, in one statement, and not at all when idle.

    `owner` gives the id of this worker process, under which it says where it is quiet. `run` has to run beside the work.
    """

    def __init__(self, database: Database, owner: Callable[[], UUID | None]) -> None:
        self._database = database
        self._owner = owner
        self._routes: weakref.WeakSet[FleetRoute] = weakref.WeakSet()
        self._servers: dict[UUID, SeenServer] = {}
        self._calls: defaultdict[UUID, set[asyncio.Timeout]] = defaultdict(set)
        self._failures: dict[UUID, str] = {}
        self._said_quiet: set[UUID] = set()
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        self.round = 0  # how often it has looked

    def route(self, seat: Seat) -> FleetRoute:
        """The way of one rollout. It is known here for as long as somebody keeps it."""
        assert seat.server is not None  # noqa: S101 - what runs has one
        route = FleetRoute(self, seat, seat.server)
        if not any(server.policy_id == seat.policy_id for server in self._servers.values()):
            self._wake.set()
        self._routes.add(route)
        well = (LLMServer.Admission.OPEN, LLMServer.Health.LIVE, LLMServer.Hold.NONE)
        self._note(SeenServer(route.server_id, seat.policy_id, seat.server, *well, room=None, running=0))
        return route

    async def run(self) -> None:
        """Look, until cancelled."""
        while True:
            if not self._routes:
                self._servers.clear()
                self._wake.clear()
                await self._wake.wait()
            try:
                await self._look()
            except (OperationalError, InterfaceError) as error:
                logger.warning("LLM servers not looked at; trying again", error=str(error))
            except Exception:
                logger.exception("LLM servers not looked at; trying again")
            await asyncio.sleep(_SHORTEST_LOOK_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS - _SHORTEST_LOOK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()

    def seen(self, server_id: UUID) -> SeenServer | None:
        """The server as it was last seen; None when it is gone."""
        return self._servers.get(server_id)

    def others(self, route: FleetRoute) -> list[SeenServer]:
        """Servers that are given work and that a rollout could move to."""
        known = (s for s in self._servers.values() if s.policy_id == route.seat.policy_id and s.id != route.server_id)
        version = route.seat.required_version
        return [s for s in known if s.room is not None and version in (None, s.address.policy_version)]

    @contextlib.asynccontextmanager
    async def calling(self, server: SeenServer) -> AsyncIterator[None]:
        """A call in flight. Raises `CallCut` when a hold cuts it."""
        cut = asyncio.timeout(None)
        calls = self._calls[server.id]
        try:
            async with cut:
                calls.add(cut)
                try:
                    yield
                finally:
                    calls.discard(cut)
                    if not calls and self._is_held(server.id):
                        self._wake.set()  # whoever changes its weights waits for this
        except TimeoutError as error:
            if cut.expired():
                raise CallCut from error
            raise

    def report(self, server: SeenServer, error: ModelError) -> None:
        """A call failed there. Not held against a server that was told to take none: they may be ended there."""
        now = self._servers.get(server.id, server)
        if not now.hold and now.admission in CALLED:
            self._failures[server.id] = str(error)
            self._wake.set()

    async def move(self, route: FleetRoute, avoid: set[UUID]) -> UUID | None:
        """Ask for a server; None when there is none. Raises Django's errors when the database does not answer."""
        seat = route.seat
        chosen = await self._database.call(
            move_rollout, rollout_id=seat.rollout_id, attempt=seat.attempt, owner=seat.owner, avoid=avoid
        )
        if chosen is not None and chosen != route.server_id:
            for server in await self._database.call(see_servers, [seat.policy_id]):
                self._note(server)
        return chosen

    async def next_look(self) -> None:
        """Wait until the servers were looked at again."""
        await self._looked.wait()

    def _note(self, server: SeenServer) -> None:
        """What a claim or a move has read, unless the last look is as new: it knows of holds, under which no call may begin."""
        known = self._servers.get(server.id)
        if known is None or known.address.policy_version < server.address.policy_version:
            self._servers[server.id] = server

    def _is_held(self, server_id: UUID) -> bool:
        return server_id in self._servers and bool(self._servers[server_id].hold)

    async def _look(self) -> None:
        failures, self._failures = self._failures, {}
        if failures:
            await self._database.call(note_failed_calls, failures)
        policies = self._policies()
        seen = await self._database.call(see_servers, policies)
        held = {server.id: server for server in seen if server.hold}
        if self._said_quiet - held.keys():
            await self._say_quiet(self._said_quiet & held.keys())  # before calls begin: another hold may come at any moment
        came = self._policies() - policies  # while it looked
        noted = {id_: server for id_, server in self._servers.items() if server.policy_id in came}
        self._servers = noted | {server.id: server for server in seen}
        self.round += 1
        for server in held.values():
            if server.hold == LLMServer.Hold.CUT:
                for cut in self._calls[server.id]:
                    cut.reschedule(asyncio.get_running_loop().time())
        # From here on no call begins there until the next look.
        if held:
            await self._say_quiet({id_ for id_ in held if not self._calls[id_]})
        self._looked.set()
        self._looked = asyncio.Event()

    def _policies(self) -> set[UUID]:
        return {route.seat.policy_id for route in self._routes}

    async def _say_quiet(self, servers: set[UUID]) -> None:
        """Said again while a hold lasts: another hold than the one it was said of may have come meanwhile."""
        if (owner := self._owner()) is not None:
            self._said_quiet |= servers  # it may be stored and the answer lost
            await self._database.call(note_quiet, worker_id=owner, servers=servers)
            self._said_quiet = servers
