"""Which rollouts are hinted, in which order, and who takes back what a lost worker held."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from rollouts.engine.errors import Failure
from rollouts.engine.records import MessageRecord, RunOutcome, TurnRecord
from rollouts.environments.base import RewardComponent, Score
from rollouts.lifecycle import Cause, Fidelity, Phase, Stage, State, Termination
from rollouts.models import Attempt, Message, Node, RescuerPass, Rollout, RolloutEvent, WorkerProcess
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.claim import claim_rollouts
from rollouts.services.dispatch import due_hints, end_waits
from rollouts.services.finish import Scored, fail, finish_scored, hand_back
from rollouts.services.lease import Heartbeat, Holding, renew
from rollouts.services.nodes import drain_node
from rollouts.services.progress import Initialized, Ran, TurnWrite, hand_over_for_evaluation, hand_over_ready, record_turns
from rollouts.services.reap import reap
from rollouts.services.transition import Guard, move
from tests.integration.domain import Domain

DONE = RunOutcome(Termination(Phase.RUN, Cause.COMPLETED), {"answer": "3"}, Fidelity.TOKEN_EXACT)
LOST = Failure(Termination(Phase.RUN, Cause.SANDBOX_ERROR, "gone"), retryable=True, traceback="Traceback: gone")


def lose(worker: WorkerProcess) -> None:
    WorkerProcess.objects.filter(id=worker.id).update(lease_expires_at=timezone.now() - timedelta(minutes=1))


def refreshed(rollout: Rollout) -> Rollout:
    rollout.refresh_from_db()
    return rollout


class TestTheWholeWay:
    def test_from_queue_to_reward(self, domain: Domain):
        rollout = domain.submit()[0]
        assert hand_over_ready([Initialized(domain.claim(rollout, Stage.INIT), "")]) == [True]
        running = domain.claim(rollout, Stage.RUN)
        assert running.server is not None
        assert running.server.url == domain.server.url
        assert hand_over_for_evaluation([Ran(running, DONE)]) == [True]
        evaluating = domain.claim(rollout, Stage.EVAL)
        assert evaluating.artefacts == {"answer": "3"}
        assert finish_scored([Scored(evaluating, Score([RewardComponent("correct", 1.0)]))]) == [True]
        rollout = refreshed(rollout)
        assert (rollout.state, rollout.reward, rollout.trainable, rollout.fidelity) == ("succeeded", 1.0, True, "token-exact")
        assert rollout.lease_owner_id is None
        assert [e.to_state for e in rollout.events.all()] == [
            "queued", "initializing", "ready", "running", "evaluating", "evaluating", "succeeded",
        ]  # fmt: skip
        assert rollout.attempts.get().outcome == "succeeded"

    def test_a_repeated_hint_claims_nothing(self, domain: Domain):
        rollout = domain.submit()[0]
        domain.claim(rollout, Stage.INIT)
        worker = domain.worker(Stage.INIT)
        assert claim_rollouts(stage=Stage.INIT, rollout_ids=[rollout.id], owner=worker.id, node="n") == []
        assert refreshed(rollout).attempt == 1

    @pytest.mark.parametrize("stage", list(Stage))
    def test_a_hint_of_a_rollout_that_is_not_here_claims_nothing(self, domain: Domain, stage: Stage):
        worker = domain.worker(stage)
        assert claim_rollouts(stage=stage, rollout_ids=[Domain.NOBODY], owner=worker.id, node="n") == []

    def test_writes_of_an_old_attempt_change_nothing(self, domain: Domain):
        rollout = domain.submit()[0]
        old = domain.claim(rollout, Stage.INIT)
        fail(claim=old, failure=LOST)
        Rollout.objects.filter(id=rollout.id).update(not_before=None)
        domain.claim(rollout, Stage.INIT)
        assert hand_over_ready([Initialized(old, "x")]) == [False]
        fail(claim=old, failure=LOST)
        assert not hand_back(rollout_id=rollout.id, guard=old.guard, stage=Stage.INIT, reason="late")
        assert record_turns([TurnWrite(old, TurnRecord(turn=0))]) == [False]
        rollout = refreshed(rollout)
        assert (rollout.state, rollout.attempt, rollout.infra_retries) == ("initializing", 2, 1)

    def test_a_turn_stored_twice_is_there_once(self, domain: Domain):
        rollout = domain.rollout_in(State.READY)
        running = domain.claim(rollout, Stage.RUN)
        record = TurnRecord(turn=0, messages=[MessageRecord(0, 0, "user", "nul \x00 and lone surrogate \ud800")])
        assert record_turns([TurnWrite(running, record)]) == [True]
        assert record_turns([TurnWrite(running, record)]) == [True]
        assert Message.objects.get(rollout=rollout).content == "nul ␀ and lone surrogate ?"

    def test_what_postgres_refuses_is_made_visible_everywhere(self, domain: Domain):
        rollout = domain.rollout_in(State.READY)
        bad = "nul \x00 half \ud800"
        outcome = RunOutcome(Termination(Phase.RUN, Cause.COMPLETED, bad), {bad: [bad]}, Fidelity.TOKEN_EXACT)
        assert hand_over_for_evaluation([Ran(domain.claim(rollout, Stage.RUN), outcome)]) == [True]
        failure = Failure(Termination(Phase.EVAL, Cause.EVALUATION_ERROR, bad), retryable=False, traceback=bad)
        fail(claim=domain.claim(rollout, Stage.EVAL), failure=failure)
        rollout = refreshed(rollout)
        assert rollout.artefacts == {"nul ␀ half ?": ["nul ␀ half ?"]}
        assert rollout.termination_detail == rollout.attempts.get().traceback == "nul ␀ half ?"


class TestRetries:
    def test_infrastructure_failures_are_repeated_and_then_end_without_a_reward(self, domain: Domain):
        run = domain.new_run(max_infra_retries=2)
        rollout = domain.submit(run=run)[0]
        for attempt in (1, 2, 3):
            Rollout.objects.filter(id=rollout.id).update(not_before=None)
            claimed = domain.claim(rollout, Stage.INIT)
            assert claimed.attempt == attempt
            fail(claim=claimed, failure=LOST)
        rollout = refreshed(rollout)
        assert (rollout.state, rollout.termination_blame, rollout.reward) == ("failed", "infrastructure", None)
        assert [a.outcome for a in Attempt.objects.filter(rollout=rollout)] == ["queued", "queued", "failed"]
        assert "gone" in Attempt.objects.filter(rollout=rollout).first().traceback

    def test_a_repeated_rollout_waits_for_its_backoff(self, domain: Domain):
        domain.worker(Stage.INIT)
        domain.worker(Stage.RUN)
        rollout = domain.submit()[0]
        fail(claim=domain.claim(rollout, Stage.INIT), failure=LOST)
        end_waits()
        assert due_hints() == []
        Rollout.objects.update(not_before=timezone.now() - timedelta(minutes=1))
        end_waits()
        assert [hint.rollout_ids for hint in due_hints()] == [[rollout.id]]

    def test_a_failed_evaluation_is_repeated_alone(self, domain: Domain):
        rollout = domain.rollout_in(State.READY)
        assert hand_over_for_evaluation([Ran(domain.claim(rollout, Stage.RUN), DONE)]) == [True]
        judge_down = Failure(Termination(Phase.EVAL, Cause.EVALUATION_ERROR, "judge 503"), retryable=True, traceback="")
        fail(claim=domain.claim(rollout, Stage.EVAL), failure=judge_down)
        rollout = refreshed(rollout)
        assert (rollout.state, rollout.attempt, rollout.lease_owner_id) == ("evaluating", 1, None)
        assert finish_scored([Scored(domain.claim(rollout, Stage.EVAL), Score([RewardComponent("correct", 0.0)]))]) == [True]

    def test_draining_burns_no_retry(self, domain: Domain):
        rollout = domain.submit()[0]
        held = domain.claim(rollout, Stage.INIT)
        assert hand_back(rollout_id=rollout.id, guard=held.guard, stage=Stage.INIT, reason="the worker is stopping")
        rollout = refreshed(rollout)
        assert (rollout.state, rollout.infra_retries, rollout.not_before) == ("queued", 0, None)


class TestReaper:
    @pytest.mark.parametrize(
        ("state", "expected"), [(State.INITIALIZING, "queued"), (State.RUNNING, "queued"), (State.EVALUATING, "evaluating")]
    )
    def test_takes_back_from_a_lost_worker(self, domain: Domain, state: State, expected: str):
        rollout = domain.rollout_in(state)
        assert rollout.lease_owner is not None
        lose(rollout.lease_owner)
        assert reap() == 1
        assert reap() == 0
        rollout = refreshed(rollout)
        assert (rollout.state, rollout.lease_owner_id, rollout.infra_retries) == (expected, None, 1)

    def test_a_lost_worker_learns_it_and_holds_nothing(self, domain: Domain):
        worker = domain.rollout_in(State.RUNNING).lease_owner
        assert worker is not None
        lose(worker)
        reap()
        assert renew(worker_id=worker.id) == Heartbeat(alive=False, held={})

    def test_a_live_worker_keeps_what_it_holds(self, domain: Domain):
        rollout = domain.rollout_in(State.RUNNING)
        assert reap() == 0
        assert renew(worker_id=rollout.lease_owner_id).held == {(rollout.id, 1): Holding()}

    def test_ready_rollouts_of_a_lost_node_are_requeued_after_a_lease(self, domain: Domain):
        rollout = domain.rollout_in(State.READY)
        assert reap() == 0
        Rollout.objects.filter(id=rollout.id).update(state_changed_at=timezone.now() - timedelta(minutes=5))
        assert reap() == 1
        rollout = refreshed(rollout)
        assert (rollout.state, rollout.infra_retries) == ("queued", 0)

    def test_declares_nobody_lost_for_a_lease_after_its_own_downtime(self, domain: Domain):
        rollout = domain.rollout_in(State.RUNNING)
        reap()
        RescuerPass.objects.update(at=timezone.now() - timedelta(minutes=5))
        assert rollout.lease_owner is not None
        lose(rollout.lease_owner)
        assert (reap(), reap()) == (0, 0)
        assert refreshed(rollout).state == "running"
        RescuerPass.objects.update(grace_until=timezone.now() - timedelta(minutes=1))
        assert reap() == 1

    def test_ready_rollouts_of_a_draining_node_go_back_at_once_and_running_ones_stay(self, domain: Domain):
        ready, running = domain.rollout_in(State.READY), domain.rollout_in(State.RUNNING)
        drain_node(node=Node.objects.get(), seconds=60)
        assert reap() == 1
        assert (refreshed(ready).state, ready.infra_retries, refreshed(running).state) == ("queued", 0, "running")


class TestStuck:
    @pytest.fixture
    def late(self, domain: Domain) -> Rollout:
        """Held for an hour; the agent had ten minutes. Its worker renews its lease."""
        rollout = domain.rollout_in(State.RUNNING)
        Rollout.objects.filter(id=rollout.id).update(state_changed_at=timezone.now() - timedelta(hours=1))
        return rollout

    def test_is_an_event_of_its_own_once_and_the_worker_is_asked_to_give_it_up(self, late: Rollout):
        assert (reap(), reap()) == (0, 0)
        assert renew(worker_id=late.lease_owner_id).held == {(late.id, 1): Holding(stuck=True)}
        event = late.events.get(kind="stuck")
        assert (event.attempt, event.from_state) == (1, "running")
        assert 3500 < event.data["held_seconds"] < 3700

    def test_is_taken_away_when_the_worker_does_not_give_it_up(self, late: Rollout):
        reap()
        Rollout.objects.filter(id=late.id).update(stuck_at=timezone.now() - timedelta(minutes=1))
        assert reap() == 1
        late = refreshed(late)
        assert (late.state, late.infra_retries, late.lease_owner_id) == ("queued", 1, None)
        assert "far past its deadline" in late.attempts.get().error

    def test_within_its_time_is_not(self, domain: Domain):
        rollout = domain.rollout_in(State.RUNNING)
        Rollout.objects.filter(id=rollout.id).update(state_changed_at=timezone.now() - timedelta(seconds=601))
        reap()
        assert renew(worker_id=rollout.lease_owner_id).held == {(rollout.id, 1): Holding()}

    def test_of_an_earlier_stage_does_not_count(self, domain: Domain, late: Rollout):
        reap()
        move([late.id], to=State.EVALUATING, guard=Guard([State.RUNNING]))
        worker = domain.claim(late, Stage.EVAL).owner
        assert renew(worker_id=worker).held == {(late.id, 1): Holding()}


class TestCancel:
    @pytest.mark.parametrize("state", [State.QUEUED, State.READY])
    def test_ends_a_waiting_rollout_at_once(self, domain: Domain, state: State):
        rollout = domain.rollout_in(state)
        assert cancel_rollouts(project=domain.project, rollout_id=rollout.id) == 1
        rollout = refreshed(rollout)
        assert (rollout.state, rollout.termination_cause, rollout.termination_blame) == ("cancelled", "cancelled", "caller")

    def test_asks_the_worker_of_a_held_one(self, domain: Domain):
        rollout = domain.rollout_in(State.RUNNING)
        assert cancel_rollouts(project=domain.project, rollout_id=rollout.id) == 1
        assert cancel_rollouts(project=domain.project, rollout_id=rollout.id) == 1
        assert renew(worker_id=rollout.lease_owner_id).held == {(rollout.id, 1): Holding(cancel_asked=True)}
        assert RolloutEvent.objects.filter(rollout=rollout, kind="cancel_requested").count() == 1

    def test_holds_when_the_worker_is_lost_or_hands_on_meanwhile(self, domain: Domain):
        lost, handed_on = domain.rollout_in(State.RUNNING), domain.submit()[0]
        initializing = domain.claim(handed_on, Stage.INIT)
        cancel_rollouts(project=domain.project, run_id=domain.run.id)
        assert hand_over_ready([Initialized(initializing, "")]) == [True]
        assert lost.lease_owner is not None
        lose(lost.lease_owner)
        reap()
        assert {refreshed(lost).state, refreshed(handed_on).state} == {"cancelled"}

    def test_holds_when_the_worker_does_not_react_for_a_lease(self, domain: Domain):
        rollout = domain.rollout_in(State.RUNNING)
        cancel_rollouts(project=domain.project, rollout_id=rollout.id)
        reap()
        assert refreshed(rollout).state == "running"
        Rollout.objects.update(cancel_requested_at=timezone.now() - timedelta(minutes=1))
        reap()
        assert (refreshed(rollout).state, rollout.termination_phase) == ("cancelled", "run")

    def test_of_another_project_does_nothing(self, domain: Domain):
        rollout = domain.submit()[0]
        assert cancel_rollouts(project=Domain("beta").project, rollout_id=rollout.id) == 0
        assert refreshed(rollout).state == "queued"
