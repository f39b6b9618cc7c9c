"""The ways of rollouts among LLM servers, as a worker process sees them: real database, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from django.conf import LazySettings

from rollouts.lifecycle import Stage
from rollouts.llm.errors import ModelError
from rollouts.llm.route import CallCut, NoServer
from rollouts.models import LLMServer, Rollout
from rollouts.services.claim import Claim
from rollouts.services.holds import callers, hold_servers, note_quiet, release_servers
from rollouts.services.servers import remove_server, set_server_state
from rollouts.worker import fleet_route
from rollouts.worker.database import Database
from rollouts.worker.fleet import FleetView
from rollouts.worker.fleet_route import FleetRoute
from tests.integration.domain import Domain
from tests.integration.test_core_races import domain

__all__ = ["domain"]

pytestmark = pytest.mark.django_db(transaction=True)

_PATIENCE = 20.0  # seconds; the view looks once in each


class Process:
    """What a worker process has: a database, a view, and a rollout in RUN on the domain's server."""

    def __init__(self, domain: Domain, database: Database) -> None:
        self.domain = domain
        self.database = database
        self.claim: Claim
        self.view = FleetView(database, owner=lambda: self.claim.owner)

    async def begin(self) -> FleetRoute:
        self.claim = await self.database.call(self._claim)
        return self.view.route(self.claim)

    def _claim(self) -> Claim:
        [rollout] = self.domain.submit()
        for stage in (Stage.INIT, Stage.RUN):
            claim = self.domain.claim(rollout, stage)
            if stage is Stage.INIT:
                Rollout.objects.filter(id=rollout.id).update(state="ready", lease_owner=None)
        return claim

    async def another_server(self, **values: Any) -> LLMServer:
        known = {"url": "http://other", "model": "m", "max_model_len": 99}
        project, policy = self.domain.project, self.domain.policy
        return await self.database.call(LLMServer.objects.create, project=project, policy=policy, **known | values)

    async def change(self, **values: Any) -> None:
        """Of the domain's server."""
        await self.database.call(lambda: LLMServer.objects.filter(id=self.domain.server.id).update(**values))

    async def until(self, condition: Callable[[], Any]) -> None:
        """A condition on the database or the view."""
        async with asyncio.timeout(_PATIENCE):
            while not await self.database.call(condition):
                await asyncio.sleep(0.02)

    async def seen(self, **values: Any) -> None:
        """The view has seen the domain's server like this."""
        server_id = self.domain.server.id

        def as_wanted() -> bool:
            server = self.view.seen(server_id)
            return server is not None and all(getattr(server, name) == value for name, value in values.items())

        await self.until(as_wanted)


@pytest.fixture
async def process(domain: Domain) -> AsyncIterator[Process]:
    process = Process(domain, Database(patience=5))
    looking = asyncio.create_task(process.view.run())
    yield process
    looking.cancel()
    await asyncio.wait([looking])
    process.database.close()


async def call(route: FleetRoute, body: Callable[[], Awaitable[None]] | None = None) -> str:
    """One call; the id of the server that it went to."""
    async with asyncio.timeout(_PATIENCE), route.call() as server:
        if body is not None:
            await body()
        return server.server_id


async def fail(route: FleetRoute, *, retryable: bool = True) -> None:
    async def body() -> None:
        raise ModelError("it answered 500", retryable=retryable)

    with pytest.raises(ModelError, match="500"):
        await call(route, body)


class Call:
    """A call that stays in flight until it is told to end."""

    def __init__(self, route: FleetRoute) -> None:
        self._end = asyncio.Event()
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(call(route, self._body))

    async def _body(self) -> None:
        self.begun.set()
        await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self.task


async def test_calls_stay_on_the_server_and_carry_its_version(process: Process):
    route = await process.begin()
    await process.another_server()
    assert {await call(route) for _ in range(3)} == {str(process.domain.server.id)}
    await process.change(policy_version=7)
    await process.until(lambda: route.server.policy_version == 7)
    async with route.call() as server:
        assert server.policy_version == 7


async def test_after_a_failure_the_next_call_goes_elsewhere_and_the_server_is_suspect(process: Process):
    route = await process.begin()
    other = await process.another_server()
    await process.until(lambda: process.view.seen(other.id))
    await fail(route)
    assert await call(route) == str(other.id)
    assert (await process.database.call(Rollout.objects.get)).llm_server_id == other.id
    await process.until(lambda: LLMServer.objects.get(id=process.domain.server.id).health == "suspect")
    server = await process.database.call(LLMServer.objects.get, id=process.domain.server.id)
    assert (server.failures, server.last_error) == (1, "it answered 500")


async def test_what_the_server_rightly_refuses_is_not_held_against_it(process: Process):
    route = await process.begin()
    await fail(route, retryable=False)
    assert await call(route) == str(process.domain.server.id)
    server = await process.database.call(LLMServer.objects.get)
    assert server.health == "live"


async def test_without_another_server_the_call_waits_until_a_probe_finds_it_well(process: Process):
    route = await process.begin()
    await fail(route)
    waiting = Call(route)
    await process.seen(health="suspect")
    assert not waiting.begun.is_set()
    await process.change(health="live")
    await waiting.begun.wait()
    await waiting.end()


async def test_it_waits_for_a_dead_server_only_so_long(process: Process, settings: LazySettings):
    settings.SERVER_WAIT_SECONDS = 0.5
    route = await process.begin()
    await process.change(health="dead")
    await process.seen(health="dead")
    with pytest.raises(NoServer, match="is dead, and no other took its place") as caught:
        await call(route)
    assert caught.value.retryable


async def test_a_paused_server_is_left_when_there_is_another(process: Process):
    route = await process.begin()
    await process.database.call(set_server_state, server=process.domain.server, state="paused")
    await process.seen(admission="paused")
    waiting = Call(route)
    await process.view.next_look()
    assert not waiting.begun.is_set()
    other = await process.another_server()
    async with asyncio.timeout(_PATIENCE):
        await waiting.begun.wait()
    await waiting.end()
    assert route.server_id == other.id


async def test_a_draining_server_keeps_its_rollouts(process: Process):
    route = await process.begin()
    await process.another_server()
    await process.database.call(set_server_state, server=process.domain.server, state="draining")
    await process.seen(admission="draining")
    assert await call(route) == str(process.domain.server.id)


async def test_rollouts_of_a_removed_server_go_elsewhere(process: Process):
    route = await process.begin()
    other = await process.another_server()
    server_id = process.domain.server.id
    await process.database.call(remove_server, server=process.domain.server)
    await process.until(lambda: process.view.seen(server_id) is None)
    assert await call(route) == str(other.id)


async def test_a_much_busier_server_is_left(process: Process, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet_route, "BALANCE_SECONDS", (0.0, 0.0))
    route = await process.begin()
    await process.change(capacity=2)
    other = await process.another_server()
    await process.seen(room=2)
    assert await call(route) == str(process.domain.server.id), "it alone on it keeps nobody else from anything"

    def fill() -> None:
        rollouts = process.domain.submit(2)
        worker = process.domain.worker()
        for rollout in rollouts:
            process.domain.claim(rollout, Stage.INIT)
        held = Rollout.objects.filter(id__in=[r.id for r in rollouts])
        held.update(state="ready", lease_owner=None)
        held.update(state="running", lease_owner=worker.id, llm_server=process.domain.server)

    await process.database.call(fill)
    await process.seen(running=3)
    assert await call(route) == str(other.id)


class TestHolds:
    async def test_a_server_is_quiet_when_the_calls_in_flight_have_ended(self, process: Process):
        route = await process.begin()
        server_id = process.domain.server.id
        in_flight = Call(route)
        await in_flight.begun.wait()
        await process.database.call(hold_servers, [server_id], LLMServer.Hold.WAIT)
        await process.seen(hold="wait")
        later = Call(route)
        await process.view.next_look()
        assert await process.database.call(callers, server_id) == {process.claim.owner}
        assert not later.begun.is_set()
        await in_flight.end()
        await process.until(lambda: not callers(server_id))
        assert not later.begun.is_set()
        await process.change(policy_version=1)
        await process.database.call(release_servers, [server_id])
        await later.begun.wait()
        assert route.server.policy_version == 1
        assert await process.database.call(callers, server_id) == {process.claim.owner}
        await later.end()

    async def test_a_call_in_flight_counts_where_its_rollout_has_left(self, process: Process):
        route = await process.begin()
        other = await process.another_server()
        await process.until(lambda: process.view.seen(other.id))
        in_flight = Call(route)
        await in_flight.begun.wait()
        await fail(route)
        assert await call(route) == str(other.id)
        server_id = process.domain.server.id
        await process.database.call(hold_servers, [server_id], LLMServer.Hold.WAIT)
        await process.seen(hold="wait")
        await process.view.next_look()
        assert await process.database.call(callers, server_id) == {process.claim.owner}
        await in_flight.end()
        await process.until(lambda: not callers(server_id))

    async def test_a_hold_that_cuts_ends_them(self, process: Process):
        route = await process.begin()
        in_flight = Call(route)
        await in_flight.begun.wait()
        await process.database.call(hold_servers, [process.domain.server.id], LLMServer.Hold.CUT)
        with pytest.raises(CallCut):
            await in_flight.task
        await process.until(lambda: not callers(process.domain.server.id))
        server = await process.database.call(LLMServer.objects.get)
        assert server.health == "live", "being cut is nobody's failure"

    async def test_a_failure_under_a_hold_is_not_held_against_the_server(self, process: Process):
        route = await process.begin()
        in_flight = asyncio.Event()
        held = asyncio.Event()

        async def body() -> None:
            in_flight.set()
            await held.wait()
            raise ModelError("it answered 503", retryable=True)

        failing = asyncio.create_task(call(route, body))
        await in_flight.wait()
        await process.database.call(hold_servers, [process.domain.server.id], LLMServer.Hold.WAIT)
        await process.seen(hold="wait")
        held.set()
        with pytest.raises(ModelError, match="503"):
            await failing
        await process.view.next_look()
        await process.view.next_look()
        assert (await process.database.call(LLMServer.objects.get)).health == "live"

    async def test_cancelling_a_rollout_is_no_cut(self, process: Process):
        route = await process.begin()
        in_flight = Call(route)
        await in_flight.begun.wait()
        in_flight.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await in_flight.task

    async def test_what_was_said_of_an_earlier_hold_does_not_count(self, process: Process):
        await process.begin()
        server_id = process.domain.server.id

        def hold_twice() -> None:
            hold_servers([server_id], LLMServer.Hold.WAIT)
            note_quiet(worker_id=process.claim.owner, servers=[server_id])
            assert not callers(server_id)
            release_servers([server_id])
            hold_servers([server_id], LLMServer.Hold.WAIT)
            assert callers(server_id) == {process.claim.owner}
            release_servers([server_id])

        # Not in the fixture's process, which would say it at once.
        process.view._routes.clear()
        await process.database.call(hold_twice)


async def test_an_idle_process_asks_nothing(process: Process):
    route = await process.begin()
    await process.until(lambda: process.view.round > 0)
    del route
    await process.until(lambda: process.view.seen(process.domain.server.id) is None)
    before = process.view.round
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await process.view.next_look()
    assert process.view.round == before
