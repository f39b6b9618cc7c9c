"""A worker process at its seams: claims and hand-overs on their way when it stops, is slow, or loses the database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.conf import settings
from django.db import OperationalError, connection, transaction

from rollouts.engine.errors import StoreFailed
from rollouts.environments import registry
from rollouts.environments.arithmetic import Arithmetic
from rollouts.environments.base import EvalContext, InitContext, Score
from rollouts.lifecycle import EventKind, Stage, State
from rollouts.models import Environment, Rollout, RolloutEvent, WorkerProcess
from rollouts.services.transition import Guard, move
from rollouts.worker import process
from rollouts.worker.database import Database
from sandboxes.models import Sandbox
from sandboxes.protocol import SandboxSpec
from sandboxes.registry import get_backend
from tests.integration.domain import Domain
from tests.integration.test_core_races import beside, domain, lock, until, waiting_for_locks

__all__ = ["beside", "domain"]

pytestmark = pytest.mark.django_db(transaction=True)


class Gated(Arithmetic):
    """Prepares a sandbox, and is not done before the test says so."""

    begun: ClassVar = threading.Event()
    gate: ClassVar = threading.Event()

    def sandbox_spec(self, config: Any, task: Any) -> SandboxSpec:
        return SandboxSpec()

    async def initialize(self, ctx: InitContext) -> None:
        self.begun.set()
        while not self.gate.is_set():
            await asyncio.sleep(0.01)


class CleansUpSlowly(Arithmetic):
    """Evaluates for ever, and when it is cancelled takes its time to clean up."""

    begun: ClassVar = 0
    ended: ClassVar = 0
    clean: ClassVar = threading.Event()

    async def evaluate(self, ctx: EvalContext) -> Score:
        type(self).begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            while not self.clean.is_set():
                await asyncio.sleep(0.01)
            type(self).ended += 1
        raise AssertionError("only a cancellation ends it")


@pytest.fixture
def gated(domain: Domain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Gated]]:
    metadata = tmp_path / "gated-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gated\nVersion: 1\n")
    entries = f"gated = {__name__}:Gated\nslow = {__name__}:CleansUpSlowly\n"
    (metadata / "entry_points.txt").write_text(f"[prorl.environments]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))
    caches = (registry.get, registry._entry_points)
    for cache in caches:
        cache.cache_clear()
    Environment.objects.update(handler="gated")
    CleansUpSlowly.begun = CleansUpSlowly.ended = 0
    CleansUpSlowly.clean.clear()
    Gated.begun.clear()
    Gated.gate.clear()
    yield Gated
    Gated.gate.set()
    for cache in caches:
        cache.cache_clear()
    backend = get_backend(settings.SANDBOX_BACKEND, settings.SANDBOX_DIR)
    for name in Sandbox.objects.values_list("name", flat=True):
        asyncio.run(backend.stop(name))


@pytest.fixture
def init_worker(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> Iterator[process.WorkerProcess]:
    yield from started(Stage.INIT, monkeypatch)


@pytest.fixture
def eval_worker(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> Iterator[process.WorkerProcess]:
    yield from started(Stage.EVAL, monkeypatch)


def started(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[process.WorkerProcess]:
    monkeypatch.setattr(settings, "HEARTBEAT_SECONDS", 0.05)
    worker = process.WorkerProcess(stage=stage, node="test-node", concurrency=4)
    worker.start()
    yield worker
    if not worker._ending:
        worker.stop()


def heartbeats(number: int, worker: process.WorkerProcess) -> Callable[[], bool]:
    """Whether it has renewed its lease so often since this was called."""
    seen: set[Any] = set()

    def enough() -> bool:
        seen.update(WorkerProcess.objects.filter(id=worker._lease.owner).values_list("lease_expires_at", flat=True))
        return len(seen) > number

    return enough


class TestStopping:
    def test_waits_for_a_claim_on_its_way_and_hands_back_what_it_brings(
        self, domain: Domain, init_worker: process.WorkerProcess, beside
    ):
        rollout = domain.submit()[0]
        domain.hint(rollout)
        with transaction.atomic():
            lock(rollout)
            job = beside(init_worker.take, [rollout.id])
            until(waiting_for_locks)
            stopped = beside(init_worker.stop)
            until(lambda: init_worker._ending)
        job.result(20)
        stopped.result(20)
        rollout.refresh_from_db()
        assert (rollout.infra_retries, rollout.state in ("queued", "ready"), rollout.lease_owner_id) == (0, True, None)

    def test_keeps_the_sandbox_of_a_rollout_that_is_just_handed_over(
        self, domain: Domain, gated: type[Gated], init_worker: process.WorkerProcess, beside
    ):
        rollout = domain.submit()[0]
        domain.hint(rollout)
        init_worker.take([rollout.id])
        assert gated.begun.wait(20)
        with transaction.atomic():
            lock(rollout)
            gated.gate.set()
            until(waiting_for_locks)
            stopped = beside(init_worker.stop)
            until(lambda: waiting_for_locks() > 1)  # it tries to hand back what it has just handed over
        stopped.result(20)
        rollout.refresh_from_db()
        assert (rollout.state, rollout.infra_retries) == ("ready", 0)
        assert Sandbox.objects.get(name=rollout.sandbox_name).stopped_at is None


def test_a_claim_that_takes_longer_than_some_heartbeats_is_not_given_back(
    domain: Domain, init_worker: process.WorkerProcess, beside
):
    rollout = domain.submit()[0]
    domain.hint(rollout)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLE rollouts_environment")  # what the claim reads once it is made
        job = beside(init_worker.take, [rollout.id])
        until(lambda: Rollout.objects.filter(state="initializing").exists())
        until(heartbeats(5, init_worker))
    job.result(20)
    until(lambda: Rollout.objects.filter(state="ready").exists())
    rollout.refresh_from_db()
    assert (rollout.attempt, rollout.infra_retries) == (1, 0)


def test_the_lease_is_renewed_while_the_work_waits_for_its_storage(init_worker: process.WorkerProcess):
    answers = threading.Event()
    waiting = [asyncio.run_coroutine_threadsafe(init_worker._database.call(answers.wait), init_worker._loop) for _ in range(32)]
    try:
        until(heartbeats(5, init_worker))
    finally:
        answers.set()
    assert all(call.result(20) for call in waiting)


@pytest.mark.usefixtures("gated")
def test_a_claim_outlives_the_slow_end_of_an_earlier_one(domain: Domain, eval_worker: process.WorkerProcess):
    """Of the same rollout in the same attempt, in the same process: EVAL was taken away from it, and given to it again."""
    Environment.objects.update(handler="slow")
    rollout = domain.rollout_in(State.EVALUATING)
    worker = WorkerProcess.objects.get(id=eval_worker._lease.owner)
    for claims in (1, 2):
        move([rollout.id], to=State.EVALUATING, guard=Guard([State.EVALUATING]), kind=EventKind.RELEASED)
        until(lambda: not any(held.interruption is None for held in eval_worker._hands.held.values()))
        domain.hint(rollout)
        eval_worker.take([rollout.id])
        until(lambda claims=claims: CleansUpSlowly.begun == claims)
    CleansUpSlowly.clean.set()
    until(lambda: CleansUpSlowly.ended == 1)
    until(heartbeats(5, eval_worker))
    rollout.refresh_from_db()
    assert (rollout.lease_owner_id, rollout.infra_retries) == (worker.id, 0)


async def test_a_database_that_stays_away_is_a_failure_that_is_repeated():
    def service() -> None:
        raise OperationalError("server closed the connection unexpectedly")

    database = Database(patience=0)
    with pytest.raises(StoreFailed, match="server closed the connection"):
        await database.insist(service)
    database.close()


@pytest.mark.usefixtures("gated")
def test_stopping_hands_back_many_rollouts_in_few_statements(domain: Domain, eval_worker: process.WorkerProcess):
    Environment.objects.update(handler="slow")
    rollouts = [domain.rollout_in(State.EVALUATING) for _ in range(4)]
    ids = [rollout.id for rollout in rollouts]
    move(ids, to=State.EVALUATING, guard=Guard([State.EVALUATING]), kind=EventKind.RELEASED)
    RolloutEvent.objects.all().delete()
    domain.hint(*rollouts)
    eval_worker.take(ids)
    CleansUpSlowly.clean.set()
    until(lambda: CleansUpSlowly.begun == len(ids))
    eval_worker.stop()
    handed_back = RolloutEvent.objects.filter(kind=EventKind.RELEASED.value, data__reason="the worker is stopping")
    assert handed_back.count() == len(ids)
    assert len(set(handed_back.values_list("at", flat=True))) < len(ids)  # one moment for each statement
    assert not Rollout.objects.filter(lease_owner__isnull=False).exists()
