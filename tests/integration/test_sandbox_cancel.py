"""A cancel at any await point of a start or a stop: one pass of the janitor later nothing is left, and every row says so."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from django.db.models import F

from rollouts.environments import registry
from rollouts.environments.arithmetic import Arithmetic
from rollouts.environments.base import InitContext
from rollouts.lifecycle import Stage, State
from rollouts.llm.client import ModelClient
from rollouts.models import Environment
from rollouts.services.finish import hand_back
from rollouts.services.transition import Guard
from rollouts.worker.database import Database
from rollouts.worker.fleet import FleetView
from rollouts.worker.janitor import Janitor
from rollouts.worker.sandboxes import Sandboxes
from rollouts.worker.stages import CARRY_OUT, Tools
from rollouts.worker.writes import Writes
from sandboxes.backends.none import NoBackend
from sandboxes.errors import BackendUnavailable, SandboxError, SandboxLost
from sandboxes.models import Sandbox
from sandboxes.protocol import Backend, Bind, SandboxSpec
from sandboxes.registry import backend_names, get_backend
from sandboxes.services import note_start
from tests.integration.domain import Domain
from tests.integration.interruption import Interruption
from tests.integration.sandbox_leftovers import leftovers, marked_spec
from tests.integration.test_core_races import domain

__all__ = ["domain"]

pytestmark = pytest.mark.django_db(transaction=True)

NODE = "test-node"
USED = "/tmp/used"  # noqa: S108 - inside
_MOST_AWAIT_POINTS = 500  # far more than there are: a coroutine that never ends by itself must not keep the test going

Scenario = Callable[["Worker", Interruption], Awaitable[None]]


class Worker:
    """What a worker process has for its sandboxes, for the time of one event loop."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.database = Database(patience=5)
        self.sandboxes = Sandboxes(database=self.database, backend=backend, node=NODE)
        self.janitor = Janitor(database=self.database, backend=backend, node=NODE)

    async def begin(self, spec: SandboxSpec) -> str:
        """A running sandbox of a rollout that is over."""
        name = f"prorl-{uuid4().hex}-1"
        await self.database.call(note_start, name=name, rollout_id=uuid4(), attempt=1, node=NODE, backend=self.backend.name)
        await self.backend.start(name, spec)
        return name

    async def sweep(self) -> None:
        """One pass of the janitor, and the end of all threads."""
        # The janitor leaves young rows to their workers.
        await self.database.call(lambda: Sandbox.objects.update(created_at=F("created_at") - timedelta(minutes=1)))
        await self.janitor.sweep()
        await asyncio.get_running_loop().shutdown_default_executor()
        self.database.close()


@pytest.fixture(params=sorted(set(backend_names()) - {NoBackend.name}))
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    backend = get_backend(request.param, tmp_path / "sandboxes")
    try:
        asyncio.run(backend.probe())
    except BackendUnavailable as why:
        pytest.skip(str(why))
    return backend


def at_every_await_point(backend: Backend, scenario: Scenario, marker: str) -> int:
    """Run the scenario again and again, cancelled one await point later each time, until it ends by itself; how often.

    The janitor passes as soon as the cancelled coroutine has ended, while threads it left behind may still be at work.
    """

    async def once(interruption: Interruption) -> None:
        worker = Worker(backend)
        try:
            await scenario(worker, interruption)
        finally:
            await worker.sweep()

    for point in range(1, _MOST_AWAIT_POINTS):
        interruption = Interruption(point)
        asyncio.run(once(interruption))
        assert asyncio.run(leftovers(backend, marker)) == {}, f"after a cancel at await point {point}"
        open_rows = Sandbox.objects.filter(stopped_at=None) | Sandbox.objects.filter(stop_reason="")
        assert not open_rows.exists(), f"after a cancel at await point {point}"
        if not interruption.happened:
            return point - 1
    raise AssertionError("it never ends by itself")


def test_start(backend: Backend) -> None:
    marker = secrets.token_hex(8)

    async def start(worker: Worker, interruption: Interruption) -> None:
        name = f"prorl-{uuid4().hex}-1"
        call = {"name": name, "rollout_id": uuid4(), "attempt": 1, "node": NODE, "backend": backend.name}
        await worker.database.call(note_start, **call)
        await interruption.run(backend.start(name, marked_spec(marker)))

    assert at_every_await_point(backend, start, marker) > 1


def test_stop(backend: Backend) -> None:
    marker = secrets.token_hex(8)

    async def stop(worker: Worker, interruption: Interruption) -> None:
        name = await worker.begin(marked_spec(marker))
        await interruption.run(backend.stop(name))

    assert at_every_await_point(backend, stop, marker) > 0


def test_stop_by_a_worker(backend: Backend) -> None:
    marker = secrets.token_hex(8)

    async def stop(worker: Worker, interruption: Interruption) -> None:
        name = await worker.begin(marked_spec(marker))
        await interruption.run(worker.sandboxes.stop(name, "RUN ended"))

    assert at_every_await_point(backend, stop, marker) > 1


class InSandbox(Arithmetic):
    """Prepares something in a sandbox."""

    spec: ClassVar = SandboxSpec()

    def sandbox_spec(self, config: Any, task: Any) -> SandboxSpec:
        return self.spec

    async def initialize(self, ctx: InitContext) -> None:
        assert (await ctx.sandbox.bash(f"touch {USED}", timeout=20)).exit_code == 0


@pytest.fixture
def in_sandbox(domain: Domain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The domain's environment is one with a sandbox, installed for this test; the marker of its sandboxes."""
    metadata = tmp_path / "in_sandbox-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: in_sandbox\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[prorl.environments]\nin-sandbox = {__name__}:InSandbox\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for cache in (registry.get, registry._entry_points):
        cache.cache_clear()
    Environment.objects.update(handler="in-sandbox")
    marker = secrets.token_hex(8)
    monkeypatch.setattr(InSandbox, "spec", marked_spec(marker))
    yield marker
    for cache in (registry.get, registry._entry_points):
        cache.cache_clear()


async def carry_out_init(domain: Domain, worker: Worker, interruption: Interruption) -> None:
    """For a fresh rollout, which goes back to the queue afterwards, as by its worker process or by the rescuer."""
    claimed = await worker.database.call(lambda: domain.claim(domain.submit()[0], Stage.INIT))
    fleet = FleetView(worker.database, owner=lambda: None)
    tools = Tools(
        database=worker.database,
        writes=Writes(worker.database),
        models=ModelClient(),
        sandboxes=worker.sandboxes,
        fleet=fleet,
    )
    try:
        await interruption.run(CARRY_OUT[Stage.INIT](tools, claimed))
    finally:
        await tools.models.close()
        guard = Guard([State.INITIALIZING, State.READY])
        await worker.database.call(
            hand_back, rollout_id=claimed.rollout_id, guard=guard, stage=Stage.INIT, reason="it was interrupted"
        )


def test_all_of_init(domain: Domain, in_sandbox: str, backend: Backend) -> None:
    async def initialize(worker: Worker, interruption: Interruption) -> None:
        await carry_out_init(domain, worker, interruption)

    assert at_every_await_point(backend, initialize, in_sandbox) > 5


@pytest.mark.parametrize("backend", ["bubblewrap"], indirect=True)  # the pool is the same for all
def test_all_of_init_in_a_warm_sandbox(domain: Domain, in_sandbox: str, backend: Backend, settings: Any) -> None:
    """What was interrupted is destroyed: none that a rollout has used is ever kept warm."""
    settings.SANDBOX_WARM = 1
    holder = domain.worker(Stage.INIT, node=NODE).id
    warm = Sandbox.objects.filter(holder=holder, ready_at__isnull=False, stopped_at=None)

    async def is_unused(name: str) -> bool:
        try:
            session = await backend.connect(name)
        except SandboxLost:
            return True  # what was interrupted is destroyed after that, maybe just now
        try:
            return (await session.bash(f"ls {USED}", timeout=20)).exit_code != 0
        except SandboxLost:
            return True
        finally:
            await session.close()

    async def go_through() -> int:
        worker = Worker(backend)
        pool = asyncio.create_task(worker.sandboxes.keep_warm(lambda: holder))
        try:
            await carry_out_init(domain, worker, Interruption(_MOST_AWAIT_POINTS))  # what was asked for once is kept warm
            for point in range(1, _MOST_AWAIT_POINTS):
                async with asyncio.timeout(60):
                    while not await worker.database.call(warm.exists):
                        await asyncio.sleep(0.02)
                names = await worker.database.call(lambda: list(warm.values_list("name", flat=True)))
                assert all([await is_unused(name) for name in names]), f"after a cancel at await point {point - 1}"
                interruption = Interruption(point)
                await carry_out_init(domain, worker, interruption)
                if not interruption.happened:
                    return point - 1
        finally:
            pool.cancel()
            await asyncio.gather(pool, return_exceptions=True)
            await worker.sweep()
        raise AssertionError("it never ends by itself")

    assert asyncio.run(go_through()) > 5
    assert asyncio.run(leftovers(backend, in_sandbox)) == {}
    assert not Sandbox.objects.filter(stopped_at=None).exists()


def test_a_start_that_fails_leaves_a_row_that_says_when_and_why_it_ended(
    domain: Domain, in_sandbox: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InSandbox, "spec", SandboxSpec(binds=(Bind("/nonexistent", "/opt/x"),)))

    async def initialize() -> None:
        worker = Worker(backend)
        with pytest.raises(SandboxError):
            await carry_out_init(domain, worker, Interruption(_MOST_AWAIT_POINTS))
        await worker.sweep()

    asyncio.run(initialize())
    assert asyncio.run(leftovers(backend, in_sandbox)) == {}
    row = Sandbox.objects.get()
    assert (row.ready_at, row.stop_reason) == (None, "initialisation did not finish")
    assert row.stopped_at is not None
