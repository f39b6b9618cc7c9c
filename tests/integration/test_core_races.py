"""What happens at the same time, and what comes too late: with real threads, connections and locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.utils import timezone

from rollouts.lifecycle import Stage, State
from rollouts.models import LLMServer, Rollout, Run, WorkerProcess
from rollouts.services.cancel import cancel_rollouts, finish_cancels
from rollouts.services.claim import claim_rollouts
from rollouts.services.dispatch import due_hints, end_waits
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db(transaction=True)

Result = TypeVar("Result")


@pytest.fixture
def domain(transactional_db: None) -> Domain:
    return Domain()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[Any]]]:
    """Runs a function in another thread, with a connection of its own."""
    with ThreadPoolExecutor() as threads:

        def run(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Future[Result]:
            def unit() -> Result:
                try:
                    return function(*args, **kwargs)
                finally:
                    connection.close()

            return threads.submit(unit)

        yield run


def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.01)


def waiting_for_locks() -> int:
    """How many statements are held up."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted")
        return int(cursor.fetchone()[0])


def lock(rollout: Rollout) -> None:
    Rollout.objects.select_for_update().get(id=rollout.id)


class TestTheDispatcher:
    """Others lock rollouts in the order of their ids; whoever waits while holding a later one can deadlock."""

    @pytest.fixture
    def queued(self, domain: Domain) -> list[Rollout]:
        """Two rollouts, the later one more urgent."""
        LLMServer.objects.update(capacity=1000)
        domain.worker(Stage.INIT)
        domain.worker(Stage.RUN)
        rollouts = sorted(domain.submit(2), key=lambda rollout: rollout.id)
        Rollout.objects.filter(id=rollouts[1].id).update(priority=90)
        return rollouts

    def test_passes_over_what_is_locked(self, queued: list[Rollout], beside):
        with transaction.atomic():
            lock(queued[0])
            hints = beside(due_hints).result(20)
        assert [hint.rollout_ids for hint in hints] == [[queued[1].id]]
        assert [hint.rollout_ids for hint in due_hints()] == [[queued[0].id]]

    @pytest.mark.parametrize("column", ["hinted_at", "not_before"])
    def test_ends_waits_of_what_is_not_locked(self, queued: list[Rollout], beside, column: str):
        Rollout.objects.update(**{column: timezone.now() - timedelta(hours=1)})
        with transaction.atomic():
            lock(queued[0])
            beside(end_waits).result(20)
        assert list(Rollout.objects.filter(**{column: None}).values_list("id", flat=True)) == [queued[1].id]
        end_waits()
        assert Rollout.objects.filter(**{column: None}).count() == 2


class TestClaims:
    def test_at_once_do_not_both_take_the_last_room_of_a_server(self, domain: Domain, beside):
        LLMServer.objects.update(capacity=1)
        rollouts = [domain.rollout_in(State.READY) for _ in range(2)]
        domain.hint(*rollouts)
        workers = [domain.worker(Stage.RUN) for _ in rollouts]

        def claim(rollout: Rollout, worker: WorkerProcess) -> list[UUID]:
            claims = claim_rollouts(stage=Stage.RUN, rollout_ids=[rollout.id], owner=worker.id, node=worker.node)
            return [claimed.rollout_id for claimed in claims]

        with transaction.atomic():
            first = claim(rollouts[0], workers[0])
            second = beside(claim, rollouts[1], workers[1])
            until(lambda: second.done() or waiting_for_locks())
        assert first == [rollouts[0].id]
        assert second.result(20) == []

    def test_of_a_void_hint_takes_nothing(self, domain: Domain):
        """The dispatcher gave what it counted for this rollout to another one meanwhile."""
        Run.objects.update(max_in_flight=1)
        LLMServer.objects.update(capacity=1000)
        worker = domain.worker(Stage.INIT)
        domain.worker(Stage.RUN)
        late = domain.submit()[0]
        [hint] = due_hints()
        assert hint.rollout_ids == [late.id]
        Rollout.objects.update(hinted_at=timezone.now() - timedelta(hours=1))
        end_waits()
        urgent = domain.submit()[0]
        Rollout.objects.filter(id=urgent.id).update(priority=90)
        for ids in (hint.rollout_ids, due_hints()[0].rollout_ids):
            claim_rollouts(stage=Stage.INIT, rollout_ids=ids, owner=worker.id, node=worker.node)
        assert list(Rollout.objects.filter(state="initializing").values_list("id", flat=True)) == [urgent.id]

    @pytest.mark.parametrize("column", ["lost_at", "stopped_at"])
    def test_of_a_worker_that_is_gone_take_nothing(self, domain: Domain, column: str):
        """It was stopped for longer than its lease, wakes up with a hint in its hands, and has not looked at its lease yet."""
        rollout = domain.submit()[0]
        worker = domain.worker(Stage.INIT)
        domain.hint(rollout)
        WorkerProcess.objects.update(**{column: timezone.now()})
        assert claim_rollouts(stage=Stage.INIT, rollout_ids=[rollout.id], owner=worker.id, node=worker.node) == []
        rollout.refresh_from_db()
        assert (rollout.state, rollout.attempt) == ("queued", 0)


class TestCancel:
    def test_of_a_run_reaches_the_workers_before_anything_else(self, domain: Domain, beside):
        """Also when there are so many waiting rollouts that it takes long to end them."""
        queued, held = domain.submit()[0], domain.rollout_in(State.RUNNING)
        with transaction.atomic():
            lock(queued)
            cancelled = beside(cancel_rollouts, project=domain.project, run_id=domain.run.id)
            until(waiting_for_locks)
            assert Rollout.objects.get(id=held.id).cancel_requested_at is not None
        assert cancelled.result(20) == 2

    def test_of_a_run_that_is_cut_short_goes_on(self, domain: Domain):
        held, queued = domain.rollout_in(State.RUNNING), domain.submit()[0]
        Run.objects.filter(id=domain.run.id).update(cancelled_at=timezone.now())
        other = domain.submit(run=domain.new_run())[0]
        finish_cancels()
        assert Rollout.objects.get(id=held.id).cancel_requested_at is not None
        assert Rollout.objects.get(id=queued.id).state == "cancelled"
        assert Rollout.objects.get(id=other.id).state == "queued"
