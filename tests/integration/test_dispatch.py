"""Which rollouts are hinted, to whom, in which order, and at what cost."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from uuid import UUID

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from rollouts.engine.records import RunOutcome
from rollouts.lifecycle import Cause, Fidelity, Phase, Stage, State, Termination
from rollouts.models import LLMServer, Node, Policy, Project, Rollout, Run, WorkerProcess
from rollouts.services.dispatch import MESSAGE_SIZE, due_hints, end_waits, unmark
from rollouts.services.progress import Ran, hand_over_for_evaluation
from tests.integration.domain import Domain

DONE = RunOutcome(Termination(Phase.RUN, Cause.COMPLETED), {"answer": "3"}, Fidelity.TOKEN_EXACT)


def hinted() -> list[UUID]:
    """What one round hints, in the order of its messages."""
    return [rollout_id for hint in due_hints() for rollout_id in hint.rollout_ids]


def by_queue() -> Counter[str]:
    """How many rollouts one round hints to each queue."""
    return Counter(queue for hint in due_hints() for queue in [hint.queue] * len(hint.rollout_ids))


def evaluating(domain: Domain, sandbox_name: str = "") -> Rollout:
    """A rollout that waits for its evaluation."""
    rollout = domain.rollout_in(State.READY)
    hand_over_for_evaluation([Ran(domain.claim(rollout, Stage.RUN), DONE)])
    WorkerProcess.objects.update(stopped_at=timezone.now())
    Rollout.objects.filter(id=rollout.id).update(sandbox_name=sandbox_name)
    return rollout


@pytest.fixture
def wide(domain: Domain) -> Domain:
    """Nothing is scarce: what holds back is what the test adds."""
    LLMServer.objects.update(capacity=1000)
    domain.worker(Stage.INIT, concurrency=1000)
    domain.worker(Stage.RUN, concurrency=1000)
    return domain


class TestHints:
    def test_once_and_again_after_the_timeout(self, wide: Domain):
        rollout = wide.submit()[0]
        assert hinted() == [rollout.id]
        end_waits()
        assert hinted() == []
        Rollout.objects.update(hinted_at=timezone.now() - timedelta(minutes=1))
        end_waits()
        assert hinted() == [rollout.id]

    def test_at_once_again_when_the_broker_refused(self, wide: Domain):
        rollout = wide.submit()[0]
        unmark(due_hints())
        assert Rollout.objects.get().node == ""
        assert hinted() == [rollout.id]

    def test_messages_are_small_and_every_worker_process_can_get_one(self, domain: Domain):
        LLMServer.objects.update(capacity=1000)
        for _ in range(4):
            domain.worker(Stage.INIT, concurrency=10)
        domain.worker(Stage.RUN, concurrency=100)
        domain.submit(20)
        assert [len(hint.rollout_ids) for hint in due_hints()] == [5, 5, 5, 5]
        domain.worker(Stage.INIT, concurrency=1)
        WorkerProcess.objects.filter(concurrency=10).update(stopped_at=timezone.now())
        WorkerProcess.objects.filter(concurrency=1).update(concurrency=200)
        domain.submit(50)
        sizes = [len(hint.rollout_ids) for hint in due_hints()]
        assert max(sizes) == MESSAGE_SIZE
        assert sum(sizes) == 50

    def test_a_round_takes_as_many_statements_for_many_as_for_one(self, wide: Domain):
        for n in (1, 100):
            wide.submit(n)
            with CaptureQueriesContext(connection) as queries:
                assert len(hinted()) == n
            assert len(queries) <= 6


class TestRoom:
    def test_of_the_workers(self, domain: Domain):
        domain.worker(Stage.INIT, concurrency=3)
        domain.worker(Stage.RUN, concurrency=8)
        domain.submit(20)
        assert len(hinted()) == 3
        assert hinted() == []

    def test_of_workers_that_are_alive_and_not_draining(self, domain: Domain):
        domain.submit(20)
        for column in ("lost_at", "stopped_at", "draining_since"):
            domain.worker(Stage.INIT)
            domain.worker(Stage.RUN)
            WorkerProcess.objects.update(**{column: timezone.now()})
        domain.worker(Stage.INIT)
        domain.worker(Stage.RUN)
        WorkerProcess.objects.update(lease_expires_at=timezone.now() - timedelta(minutes=1))
        assert hinted() == []

    def test_init_stays_close_to_run(self, domain: Domain, settings):
        settings.READY_BUFFER = 2
        domain.worker(Stage.INIT, concurrency=100)
        domain.worker(Stage.RUN, concurrency=1)
        domain.submit(20)
        assert len(hinted()) == 3

    def test_every_node_has_a_ready_buffer_and_limits_of_its_own(self, domain: Domain, settings):
        settings.READY_BUFFER = 2
        LLMServer.objects.update(capacity=1000)
        for name in ("plain", "buffered", "capped", "closed"):
            domain.worker(Stage.INIT, concurrency=100, node=name)
            domain.worker(Stage.RUN, concurrency=4, node=name)
        Node.objects.filter(name="buffered").update(ready_buffer=10)
        Node.objects.filter(name="capped").update(max_init=3)
        Node.objects.filter(name="closed").update(max_run=0)
        domain.submit(100)
        assert by_queue() == {"rollouts.init.plain": 6, "rollouts.init.buffered": 14, "rollouts.init.capped": 3}

    def test_a_node_without_run_workers_initialises_nothing(self, domain: Domain):
        domain.worker(Stage.INIT)
        domain.worker(Stage.RUN, node="other")
        domain.submit()
        assert hinted() == []

    def test_of_the_llm_servers(self, domain: Domain):
        LLMServer.objects.update(capacity=2)
        domain.worker(Stage.RUN, concurrency=10)
        domain.worker(Stage.RUN, concurrency=10, node="other")
        for _ in range(3):
            domain.rollout_in(State.READY)
        assert by_queue() == {"rollouts.run.test-node": 2}

    def test_a_policy_whose_servers_are_full_holds_back_no_other(self, domain: Domain, settings):
        settings.READY_BUFFER = 2
        LLMServer.objects.update(capacity=1)
        domain.worker(Stage.INIT, concurrency=100)
        domain.worker(Stage.RUN, concurrency=10)
        domain.submit(100)
        assert len(hinted()) == 3
        other = Policy.objects.create(project=domain.project, name="other")
        LLMServer.objects.create(project=domain.project, policy=other, url="http://b", model="m", max_model_len=1, capacity=100)
        run = Run.objects.create(project=domain.project, name="other", policy=other, priority=0, settings=domain.run.settings)
        domain.submit(100, run=run)
        assert set(Rollout.objects.filter(id__in=hinted()).values_list("run_id", flat=True)) == {run.id}

    def test_nothing_starts_without_a_live_server(self, wide: Domain):
        LLMServer.objects.update(health="dead")
        wide.submit()
        assert hinted() == []

    def test_a_draining_node_starts_nothing_and_still_evaluates_until_its_deadline(self, domain: Domain):
        rollout = evaluating(domain, sandbox_name="prorl-x-1")
        for stage in Stage:
            domain.worker(stage)
        domain.submit()
        now = timezone.now()
        Node.objects.update(draining_since=now, drain_deadline=now + timedelta(minutes=1))
        assert hinted() == [rollout.id]
        Rollout.objects.update(hinted_at=None)
        Node.objects.update(drain_deadline=now - timedelta(minutes=1))
        assert hinted() == []


class TestOrder:
    def test_higher_priority_first_and_projects_share(self, domain: Domain):
        domain.worker(Stage.INIT, concurrency=4)
        domain.worker(Stage.RUN, concurrency=16)
        beta = Domain("beta")
        domain.submit(10)
        urgent = domain.submit(1)[0]
        Rollout.objects.filter(id=urgent.id).update(priority=90)
        beta.submit(10)
        chosen = Rollout.objects.filter(id__in=hinted())
        assert chosen.filter(project=domain.project).count() == chosen.filter(project=beta.project).count() == 2
        assert urgent in chosen

    def test_the_project_with_the_fewest_in_flight_catches_up(self, domain: Domain):
        beta = Domain("beta")
        for _ in range(3):
            domain.rollout_in(State.RUNNING)
        WorkerProcess.objects.filter(stage="init").update(stopped_at=timezone.now())
        domain.worker(Stage.INIT, concurrency=5)
        domain.submit(10)
        beta.submit(10)
        projects = Counter(Rollout.objects.filter(id__in=hinted()).values_list("project_id", flat=True))
        assert projects == {beta.project.id: 4, domain.project.id: 1}

    def test_oldest_first_within_a_priority(self, domain: Domain):
        domain.worker(Stage.INIT, concurrency=3)
        domain.worker(Stage.RUN)
        first = sorted(rollout.id for rollout in domain.submit(2))
        second = sorted(rollout.id for rollout in domain.submit(2, run=domain.new_run()))
        assert hinted() == [*first, second[0]]

    @pytest.mark.parametrize("owner", [Run, Project])
    def test_max_in_flight_holds_back_its_own_and_nobody_else(self, wide: Domain, owner: type[Run] | type[Project]):
        beta = Domain("beta")
        LLMServer.objects.update(capacity=1000)
        id_ = wide.run.id if owner is Run else wide.project.id
        owner.objects.filter(id=id_).update(max_in_flight=3)
        wide.rollout_in(State.EVALUATING)
        wide.submit(50)
        beta.submit(5)
        projects = Counter(Rollout.objects.filter(id__in=hinted()).values_list("project_id", flat=True))
        assert projects == {wide.project.id: 2, beta.project.id: 5}
        assert hinted() == []


class TestEvaluation:
    def test_stays_on_the_node_that_holds_the_sandbox(self, domain: Domain):
        rollout = evaluating(domain, sandbox_name="prorl-x-1")
        domain.worker(Stage.EVAL, node="other")
        assert by_queue() == {}
        domain.worker(Stage.EVAL)
        assert hinted() == [rollout.id]

    def test_goes_elsewhere_at_once_when_it_needs_no_sandbox(self, domain: Domain):
        evaluating(domain)
        domain.worker(Stage.EVAL, node="other")
        assert by_queue() == {"rollouts.eval.other": 1}

    def test_goes_elsewhere_when_its_node_stays_without_workers_for_a_lease(self, domain: Domain):
        evaluating(domain, sandbox_name="prorl-x-1")
        Rollout.objects.update(state_changed_at=timezone.now() - timedelta(minutes=5))
        domain.worker(Stage.EVAL, node="other")
        assert by_queue() == {"rollouts.eval.other": 1}

    def test_elsewhere_gets_no_more_than_it_has_room_for(self, domain: Domain):
        for _ in range(4):
            evaluating(domain)
        domain.worker(Stage.EVAL, node="other", concurrency=3)
        assert by_queue() == {"rollouts.eval.other": 3}
        assert by_queue() == {}
