"""What a worker process does when a heartbeat tells it that a rollout in its hands is stuck, or is its own no longer."""

from __future__ import annotations

import pytest
from django.utils import timezone

from rollouts.lifecycle import Stage, State
from rollouts.models import Rollout
from rollouts.services.finish import hand_back
from rollouts.services.transition import Guard
from rollouts.worker.process import WorkerProcess
from sandboxes.models import Sandbox
from tests.integration.domain import Domain
from tests.integration.test_core_races import beside, domain, until
from tests.integration.test_core_worker import Gated, gated, init_worker

__all__ = ["beside", "domain", "gated", "init_worker"]

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def held(domain: Domain, gated: type[Gated], init_worker: WorkerProcess) -> Rollout:
    """A rollout whose INIT does not end by itself."""
    rollout = domain.submit()[0]
    domain.hint(rollout)
    init_worker.take([rollout.id])
    assert gated.begun.wait(20)
    return rollout


def sandbox_is_gone() -> bool:
    return Sandbox.objects.get().stopped_at is not None


def test_gives_up_what_is_stuck_as_a_failure_of_the_infrastructure(held: Rollout):
    Rollout.objects.filter(id=held.id).update(stuck_at=timezone.now())
    until(lambda: Rollout.objects.get(id=held.id).state == "queued")
    rollout = Rollout.objects.get(id=held.id)
    assert (rollout.infra_retries, rollout.lease_owner_id) == (1, None)
    assert "far past its deadline" in rollout.attempts.get().error
    until(sandbox_is_gone)


def test_drops_what_was_taken_away(held: Rollout):
    assert hand_back(rollout_id=held.id, guard=Guard([State.INITIALIZING]), stage=Stage.INIT, reason="taken away")
    until(sandbox_is_gone)
    rollout = Rollout.objects.get(id=held.id)
    assert (rollout.state, rollout.infra_retries, rollout.attempt) == ("queued", 0, 1)
