"""Stopping sandboxes: many at once, one that does not end, and those of a node that never comes back."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.db.models import F
from django.test import Client
from django.utils import timezone
from structlog.testing import capture_logs

from prorl_site.doctor import Status, execution
from rollouts import metrics
from rollouts.lifecycle import EventKind, State
from rollouts.models import MetricSeries, Node, Rollout
from rollouts.selectors.metrics import gauges
from rollouts.services.nodes import register_node
from rollouts.services.sandboxes import abandon_sandboxes_of_lost_nodes
from rollouts.worker.teardown import tear_down
from sandboxes.models import Sandbox
from sandboxes.protocol import Backend
from sandboxes.services import FIRST_RETRY, LONGEST_RETRY, note_start, note_stop_failed, note_stopped
from tests.integration.domain import Domain
from tests.integration.sandbox_leftovers import leftovers, marked_spec
from tests.integration.test_core_races import beside, domain, until
from tests.integration.test_sandbox_cancel import NODE, Worker, backend

__all__ = ["backend", "beside", "domain"]

pytestmark = pytest.mark.django_db(transaction=True)

_MANY = 50
_BOUND_SECONDS = 90.0  # far more than it takes

# A child in a sandbox's process namespace that is not reaped: as long as it is not, the kernel lets process 1 not end.
_HOLDER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
for kind in ([] if os.geteuid() == 0 else ["user"]) + ["pid"]:
    if libc.setns(os.open(f"/proc/{sys.argv[1]}/ns/{kind}", os.O_RDONLY), 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns {kind}")
child = os.fork()
if child == 0:
    time.sleep(600)
print("holds", flush=True)
sys.stdin.read()
os.waitpid(child, 0)
"""


@contextlib.contextmanager
def held_alive(pid: int) -> Iterator[None]:
    """Process 1 of a sandbox, given by its host pid, cannot end within the block."""
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"holds\n"
        yield
    finally:
        holder.communicate()
        assert holder.returncode == 0


def row(*, rollout: Rollout | None = None, node: str = NODE, backend: str = "bubblewrap") -> str:
    """The name of a sandbox whose row is old enough for the janitor."""
    rollout_id, attempt = (rollout.id, rollout.attempt) if rollout else (uuid4(), 1)
    name = f"prorl-{rollout_id.hex}-{attempt}"
    note_start(name=name, rollout_id=rollout_id, attempt=attempt, node=node, backend=backend)
    Sandbox.objects.filter(name=name).update(created_at=F("created_at") - timedelta(minutes=1))
    return name


def sweep(backend: Backend) -> None:
    async def once() -> None:
        worker = Worker(backend)
        try:
            await worker.janitor.sweep()
        finally:
            worker.database.close()

    asyncio.run(once())


def counted(metric: metrics.Metric) -> float:
    return sum(MetricSeries.objects.filter(name=metric.name).values_list("value", flat=True))


def test_fifty_at_once_end_in_bounded_time(backend: Backend) -> None:
    marker = secrets.token_hex(8)
    names = [row(backend=backend.name) for _ in range(_MANY)]

    async def start_all() -> None:
        gate = asyncio.Semaphore(4)

        async def start(name: str) -> None:
            async with gate:
                await backend.start(name, marked_spec(marker))
                session = await backend.connect(name)
                assert (await session.bash("sleep 600 & (setsid sleep 600 &); true", timeout=60)).exit_code == 0
                await session.close()

        await asyncio.gather(*map(start, names))

    asyncio.run(start_all())
    begun = time.monotonic()
    sweep(backend)
    seconds = time.monotonic() - begun
    print(f"{backend.name}: {_MANY} sandboxes torn down in {seconds:.2f} s")
    assert asyncio.run(leftovers(backend, marker)) == {}
    assert Sandbox.objects.filter(stopped_at__isnull=False, stop_reason="no rollout needs it").count() == _MANY
    assert seconds < _BOUND_SECONDS


class TestOneThatDoesNotEnd:
    @pytest.fixture
    def stubborn(self, backend: Backend) -> Backend:
        """The same sandboxes, by a backend that soon gives up."""
        return type(backend)(backend.state_dir, stop_timeout=0.5)

    def test_is_counted_recorded_and_tried_again_until_it_ends(self, domain: Domain, stubborn: Backend, client: Client):
        register_node(NODE)
        rollout = domain.rollout_in(State.SUCCEEDED)
        name = row(rollout=rollout, backend=stubborn.name)
        marker = secrets.token_hex(8)
        info = asyncio.run(stubborn.start(name, marked_spec(marker)))
        events = rollout.events.filter(kind=EventKind.SANDBOX.value)

        with held_alive(info.pid):
            with capture_logs() as logs:
                sweep(stubborn)
            [warning] = [line for line in logs if line["event"] == "sandbox not stopped; the janitor tries again"]
            assert (warning["log_level"], warning["sandbox"]) == ("warning", name)
            assert info.pid in warning["processes"]
            assert counted(metrics.TEARDOWN_FAILURES) == 1
            assert gauges()[metrics.SANDBOXES] == {(NODE, "leftover"): 1}
            finding = next(execution.sandboxes())
            assert (finding.status, name in finding.found, str(info.pid) in finding.found) == (Status.WARN, True, True)
            client.force_login(User.objects.create_user("researcher"))
            assert f"Sandbox {name} does not end" in client.get("/nodes/").content.decode()
            sandbox = Sandbox.objects.get()
            assert (sandbox.stopped_at, sandbox.stop_attempts) == (None, 1)
            assert str(info.pid) in sandbox.stop_error
            event = events.get()
            assert (event.attempt, event.data["sandbox"], event.data["node"]) == (rollout.attempt, name, NODE)
            assert info.pid in event.data["processes"]

            sweep(stubborn)  # within the pause: not tried
            assert Sandbox.objects.get().stop_attempts == 1

            Sandbox.objects.update(stop_retry_at=timezone.now())
            sweep(stubborn)
            assert Sandbox.objects.get().stop_attempts == 2
            assert counted(metrics.TEARDOWN_FAILURES) == 2
            assert events.count() == 1  # a sandbox that never ends does not fill the history

        Sandbox.objects.update(stop_retry_at=timezone.now())
        sweep(type(stubborn)(stubborn.state_dir, stop_timeout=60))
        sandbox = Sandbox.objects.get()
        assert sandbox.stopped_at is not None
        assert sandbox.stop_reason == "no rollout needs it"
        assert events.last().data["stopped_after_failures"] == 2
        assert gauges()[metrics.SANDBOXES] == {}
        assert asyncio.run(leftovers(stubborn, marker)) == {}

    def test_holds_up_no_other(self, backend: Backend, beside: Callable[..., Future[None]]) -> None:
        marker = secrets.token_hex(8)
        names = [row(backend=backend.name) for _ in range(4)]

        async def start_all() -> list[int]:
            return [(await backend.start(name, marked_spec(marker))).pid for name in names]

        first, *_ = asyncio.run(start_all())
        with held_alive(first):
            swept = beside(sweep, type(backend)(backend.state_dir, stop_timeout=60))
            until(lambda: Sandbox.objects.filter(stopped_at__isnull=False).count() == 3)
            assert not swept.done()
            assert Sandbox.objects.get(stopped_at=None).name == names[0]
        swept.result(60)
        assert not Sandbox.objects.filter(stopped_at=None).exists()
        assert asyncio.run(leftovers(backend, marker)) == {}

    def test_is_given_up_for_now_when_the_backend_itself_hangs(self, backend: Backend) -> None:
        name = row(backend=backend.name)
        info = asyncio.run(backend.start(name, marked_spec("hangs")))

        async def stop(seconds: float) -> bool:
            worker = Worker(backend)
            try:
                return await tear_down(worker.database, backend, name, "RUN ended", seconds=seconds)
            finally:
                worker.database.close()

        with held_alive(info.pid):
            assert asyncio.run(stop(0.2)) is False
            assert Sandbox.objects.get().stop_error == "not stopped within 0.2 s"
        assert asyncio.run(stop(60)) is True
        assert Sandbox.objects.get().stop_reason == "RUN ended"


def test_the_pause_between_tries_grows_to_a_limit() -> None:
    name = row()
    pauses = []
    for _ in range(10):
        before = timezone.now()
        sandbox = note_stop_failed(name=name, error="processes [7] are still there")
        pauses.append(sandbox.stop_retry_at - before)
    assert FIRST_RETRY <= pauses[0] < pauses[1] < pauses[2]
    assert LONGEST_RETRY <= pauses[-1] < LONGEST_RETRY * 1.5


class TestANodeThatNeverComesBack:
    @pytest.fixture
    def names(self) -> dict[str, str]:
        """By what became of their nodes."""
        names = {}
        for node in ("gone", "alive", "forgotten"):
            names[node] = row(node=node)
            if node != "forgotten":  # its row was removed in the admin
                register_node(node)
        long_ago = timezone.now() - timedelta(days=3)
        Sandbox.objects.update(created_at=long_ago)
        Node.objects.filter(name="gone").update(last_seen_at=long_ago)
        return names

    def test_leaves_rows_that_are_closed_without_a_claim_of_proof(self, names: dict[str, str]) -> None:
        row(node="new")  # its node registers in a moment
        assert abandon_sandboxes_of_lost_nodes() == 2
        closed = Sandbox.objects.filter(abandoned=True)
        assert set(closed.values_list("name", flat=True)) == {names["gone"], names["forgotten"]}
        assert all(sandbox.stopped_at and "not proven" in sandbox.stop_reason for sandbox in closed)
        assert counted(metrics.SANDBOXES_ABANDONED) == 2
        assert abandon_sandboxes_of_lost_nodes() == 0

    def test_is_not_told_by_the_clock_of_another_node(self, names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        now = timezone.now()
        monkeypatch.setattr(timezone, "now", lambda: now + timedelta(days=3650))
        abandon_sandboxes_of_lost_nodes()
        closed = set(Sandbox.objects.filter(abandoned=True).values_list("name", flat=True))
        assert closed == {names["gone"], names["forgotten"]}

    def test_or_does_after_all_and_proves_it(self, names: dict[str, str]) -> None:
        abandon_sandboxes_of_lost_nodes()
        note_stopped(name=names["gone"], reason="no rollout needs it")
        sandbox = Sandbox.objects.get(name=names["gone"])
        assert (sandbox.abandoned, sandbox.stop_reason) == (False, "no rollout needs it")
