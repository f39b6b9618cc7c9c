"""Finished rollouts are scored again: who may, what changes, and what never does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from rollouts.engine.errors import Failure
from rollouts.engine.records import RunOutcome
from rollouts.environments import registry
from rollouts.environments.arithmetic import Arithmetic
from rollouts.environments.base import RewardComponent, Score
from rollouts.lifecycle import Cause, Fidelity, Phase, Stage, State, Termination
from rollouts.models import Environment, Rescoring, Reward, Rollout, WorkerProcess
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.errors import Conflict, Refused
from rollouts.services.finish import Scored, Unscored, fail, finish_scored, finish_unscored
from rollouts.services.progress import Initialized, Ran, hand_over_for_evaluation, hand_over_ready
from rollouts.services.rescore import rescore_rollout, rescore_run
from rollouts.services.rescoring import (
    RescoringClaim,
    claim_rescorings,
    fail_rescoring,
    finish_rescoring,
    take_back_rescorings,
)
from tests.integration.domain import Domain

WRONG, RIGHT = Score([RewardComponent("correct", 0.0)]), Score([RewardComponent("correct", 1.0)])
BROKEN = Failure(Termination(Phase.EVAL, Cause.EVALUATION_ERROR, "KeyError: 'gold'"), retryable=False, traceback="Traceback: x")
JUDGE_DOWN = Failure(Termination(Phase.EVAL, Cause.EVALUATION_ERROR, "judge 503"), retryable=True, traceback="")


def ran(domain: Domain, cause: Cause = Cause.COMPLETED, fidelity: Fidelity = Fidelity.TOKEN_EXACT, **settings: Any) -> Rollout:
    """A rollout whose RUN is done."""
    rollout = domain.submit(run=domain.new_run(**settings))[0]
    assert all(hand_over_ready([Initialized(domain.claim(rollout, Stage.INIT), "")]))
    outcome = RunOutcome(Termination(Phase.RUN, cause, "as RUN said"), {"answer": "3"}, fidelity)
    claim = domain.claim(rollout, Stage.RUN)
    if cause is Cause.AGENT_TIMEOUT and settings.get("on_agent_timeout") in ("zero", "drop"):
        assert all(finish_unscored([Unscored(claim, outcome)]))
    else:
        assert all(hand_over_for_evaluation([Ran(claim, outcome)]))
    return refreshed(rollout)


def scored(domain: Domain, cause: Cause = Cause.COMPLETED, score: Score = WRONG, **settings: Any) -> Rollout:
    rollout = ran(domain, cause, **settings)
    assert all(finish_scored([Scored(domain.claim(rollout, Stage.EVAL), score)]))
    return refreshed(rollout)


def eval_failed(domain: Domain, cause: Cause = Cause.COMPLETED, failure: Failure = BROKEN, **settings: Any) -> Rollout:
    rollout = ran(domain, cause, **settings)
    fail(claim=domain.claim(rollout, Stage.EVAL), failure=failure)
    return refreshed(rollout)


def refreshed(rollout: Rollout) -> Rollout:
    return Rollout.objects.get(id=rollout.id)


def take(domain: Domain, worker: WorkerProcess | None = None, working_on: tuple[int, ...] = ()) -> RescoringClaim:
    worker = worker or domain.worker(Stage.EVAL)
    [claim] = claim_rescorings(owner=worker.id, working_on=working_on, limit=10)
    return claim


def rescored(domain: Domain, rollout: Rollout, score: Score = RIGHT, **options: Any) -> Rollout:
    rescore_rollout(project=domain.project, rollout_id=rollout.id, **options)
    assert finish_rescoring(claim=take(domain), score=score)
    return refreshed(rollout)


def newer_version(domain: Domain, handler: str = "arithmetic") -> Environment:
    return Environment.objects.create(project=domain.project, name="sums", version=2, handler=handler)


class TestAScoredRollout:
    def test_gets_the_next_reward_version_and_keeps_the_old_one(self, domain: Domain):
        before = scored(domain)
        after = rescored(domain, before)
        assert (before.reward, before.reward_version, after.reward, after.reward_version) == (0.0, 1, 1.0, 2)
        assert list(Reward.objects.filter(rollout=after).values_list("version", "value")) == [(1, 0.0), (2, 1.0)]
        assert (after.state, after.trainable, after.termination_detail) == ("succeeded", True, "as RUN said")
        event = after.events.latest("id")
        assert (event.kind, event.from_state, event.to_state) == ("rescored", "succeeded", "succeeded")
        assert (event.data["reward_version"], event.data["reward_before"], event.data["reward"]) == (2, 0.0, 1.0)
        rescoring = Rescoring.objects.get()
        assert (rescoring.state, rescoring.reward_before, rescoring.reward, rescoring.reward_version) == ("done", 0.0, 1.0, 2)

    def test_keeps_its_place_in_the_results(self, domain: Domain):
        before = scored(domain)
        after = rescored(domain, before)
        assert (after.finished_xid, after.finished_at) == (before.finished_xid, before.finished_at)

    @pytest.mark.parametrize(("policy", "trainable"), [("score", True), ("mask", False)])
    def test_that_ran_out_of_time_stays_what_its_run_makes_of_it(self, domain: Domain, policy: str, trainable: bool):
        after = rescored(domain, scored(domain, Cause.AGENT_TIMEOUT, on_agent_timeout=policy))
        assert (after.state, after.reward, after.trainable) == ("timed_out", 1.0, trainable)

    def test_without_sampled_ids_is_not_trainable_whatever_it_is_worth(self, domain: Domain):
        before = scored(domain, score=RIGHT, fidelity=Fidelity.TEXT_ONLY)
        after = rescored(domain, before)
        assert (before.reward, before.trainable, after.reward, after.trainable) == (1.0, False, 1.0, False)

    def test_with_an_unknown_component_is_not_trainable(self, domain: Domain):
        after = rescored(domain, scored(domain), Score([RewardComponent("correct", None)]))
        assert (after.state, after.reward, after.trainable, after.reward_version) == ("succeeded", None, False, 2)

    def test_can_be_scored_by_a_newer_version_of_its_environment(self, domain: Domain):
        rollout, newer = scored(domain), newer_version(domain)
        rescore_rollout(project=domain.project, rollout_id=rollout.id, environment_id=newer.id)
        assert take(domain).config == newer.config
        assert Rescoring.objects.get().environment == newer
        assert refreshed(rollout).environment == domain.environment


class TestARolloutWhoseEvalFailed:
    def test_is_repaired(self, domain: Domain):
        before = eval_failed(domain)
        after = rescored(domain, before)
        assert (before.state, before.termination_phase, before.reward) == ("failed", "eval", None)
        assert (after.state, after.reward, after.reward_version, after.trainable) == ("succeeded", 1.0, 1, True)
        termination = (after.termination_phase, after.termination_cause, after.termination_blame, after.termination_detail)
        assert termination == ("run", "completed", "policy", "as RUN said")
        event = after.events.latest("id")
        assert (event.kind, event.from_state, event.to_state) == ("rescored", "failed", "succeeded")
        assert (after.finished_xid, after.finished_at) == (before.finished_xid, before.finished_at)
        assert after.failures.get().cause == "evaluation_error", "what had failed stays in the history"

    @pytest.mark.parametrize("cause", [Cause.EVALUATION_ERROR, Cause.STAGE_TIMEOUT, Cause.WORKER_LOST, Cause.ATTEMPT_TIMEOUT])
    @pytest.mark.parametrize(
        ("run_cause", "state"),
        [(Cause.COMPLETED, "succeeded"), (Cause.MAX_TURNS, "succeeded"), (Cause.AGENT_TIMEOUT, "timed_out")],
    )
    def test_becomes_what_run_had_made_of_it(self, domain: Domain, cause: Cause, run_cause: Cause, state: str):
        failure = Failure(Termination(Phase.EVAL, cause), retryable=False, traceback="")
        after = rescored(domain, eval_failed(domain, run_cause, failure))
        assert (after.state, after.termination_cause, after.reward) == (state, run_cause.value, 1.0)

    def test_stays_as_it_is_when_scoring_fails_again(self, domain: Domain):
        before = eval_failed(domain)
        rescore_rollout(project=domain.project, rollout_id=before.id)
        assert fail_rescoring(claim=take(domain), failure=BROKEN)
        after = refreshed(before)
        assert (after.state, after.reward, after.termination_cause) == ("failed", None, "evaluation_error")
        rescoring = Rescoring.objects.get()
        assert (rescoring.state, rescoring.cause, rescoring.detail) == ("failed", "evaluation_error", "KeyError: 'gold'")
        assert "Traceback" in rescoring.traceback

    def test_can_be_asked_for_again_after_a_failure(self, domain: Domain):
        rollout = eval_failed(domain)
        rescore_rollout(project=domain.project, rollout_id=rollout.id)
        fail_rescoring(claim=take(domain), failure=BROKEN)
        assert rescored(domain, rollout).state == "succeeded"

    @pytest.mark.parametrize("state", ["succeeded", "timed_out"])
    def test_is_the_only_one_the_database_lets_out_of_a_terminal_state(self, domain: Domain, state: str):
        in_run = domain.rollout_in(State.FAILED)
        move = f"UPDATE rollouts_rollout SET state = '{state}', termination_phase = 'run' WHERE id = %s"  # noqa: S608
        with pytest.raises(IntegrityError, match="cannot move"), transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(move, [in_run.id])


class TestRefusals:
    def test_of_one_that_is_not_over(self, domain: Domain):
        with pytest.raises(Conflict, match="not ended yet"):
            rescore_rollout(project=domain.project, rollout_id=ran(domain).id)

    def test_of_one_that_was_cancelled(self, domain: Domain):
        rollout = domain.submit()[0]
        cancel_rollouts(project=domain.project, rollout_id=rollout.id)
        with pytest.raises(Conflict, match="cancelled in queue"):
            rescore_rollout(project=domain.project, rollout_id=rollout.id)

    def test_of_one_whose_run_failed(self, domain: Domain):
        rollout = domain.submit(run=domain.new_run(max_infra_retries=0))[0]
        lost = Failure(Termination(Phase.INIT, Cause.SANDBOX_ERROR), retryable=True, traceback="")
        fail(claim=domain.claim(rollout, Stage.INIT), failure=lost)
        with pytest.raises(Conflict, match="sandbox_error in init"):
            rescore_rollout(project=domain.project, rollout_id=rollout.id)

    @pytest.mark.parametrize("policy", ["zero", "drop"])
    def test_of_one_that_its_run_does_not_score(self, domain: Domain, policy: str):
        rollout = ran(domain, Cause.AGENT_TIMEOUT, on_agent_timeout=policy)
        with pytest.raises(Conflict, match="on_agent_timeout"):
            rescore_rollout(project=domain.project, rollout_id=rollout.id)

    def test_of_one_whose_artefacts_were_pruned(self, domain: Domain):
        rollout = scored(domain)
        Rollout.objects.filter(id=rollout.id).update(trajectory_pruned_at=timezone.now())
        with pytest.raises(Conflict, match="pruned on"):
            rescore_rollout(project=domain.project, rollout_id=rollout.id)

    def test_of_another_kind_of_environment(self, domain: Domain):
        other = Environment.objects.create(project=domain.project, name="other", handler="arithmetic")
        with pytest.raises(Refused) as refused:
            rescore_rollout(project=domain.project, rollout_id=scored(domain).id, environment_id=other.id)
        assert refused.value.errors[0].pointer == "/environment"

    @pytest.mark.parametrize("whole_run", [True, False])
    def test_of_another_projects_environment(self, domain: Domain, whole_run: bool):
        rollout, stranger = scored(domain), Domain("beta")
        with pytest.raises(Refused) as refused:
            if whole_run:
                rescore_run(project=domain.project, run_id=rollout.run_id, environment_id=stranger.environment.id)
            else:
                rescore_rollout(project=domain.project, rollout_id=rollout.id, environment_id=stranger.environment.id)
        assert refused.value.errors[0].pointer == "/environment"
        assert not Rescoring.objects.exists()

    def test_of_a_version_whose_handler_is_not_installed(self, domain: Domain):
        newer = newer_version(domain, handler="nowhere")
        with pytest.raises(Conflict, match="sums v2 cannot be used"):
            rescore_rollout(project=domain.project, rollout_id=scored(domain).id, environment_id=newer.id)


class ScoresInSandbox(Arithmetic):
    """Cannot rebuild what RUN left in the sandbox."""

    evaluates_in_sandbox = True


@pytest.fixture
def scores_in_sandbox(domain: Domain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The domain's environment is one that scores in the sandbox, installed for this test."""
    metadata = tmp_path / "scores-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scores\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[prorl.environments]\nin-sandbox = {__name__}:ScoresInSandbox\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    caches = (registry.get, registry._entry_points)
    for cache in caches:
        cache.cache_clear()
    Environment.objects.filter(id=domain.environment.id).update(handler="in-sandbox")
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("scores_in_sandbox")
def test_scoring_in_a_sandbox_takes_an_environment_that_can_rebuild_it(domain: Domain):
    rollout = scored(domain)
    assert rescore_run(project=domain.project, run_id=rollout.run_id) == (0, 0, 1)
    with pytest.raises(Conflict, match="no `restore`"):
        rescore_rollout(project=domain.project, rollout_id=rollout.id)


class TestARun:
    def test_queues_what_can_be_scored_and_counts_the_rest(self, domain: Domain):
        done = scored(domain)
        broken = eval_failed(domain)
        Rollout.objects.filter(id__in=[done.id, broken.id]).update(run=domain.run)
        waiting = domain.submit()[0]
        assert rescore_run(project=domain.project, run_id=domain.run.id) == (2, 0, 1)
        assert rescore_run(project=domain.project, run_id=domain.run.id) == (0, 2, 1)
        assert set(Rescoring.objects.values_list("rollout", flat=True)) == {done.id, broken.id}
        assert waiting.state == "queued"

    def test_can_be_narrowed_to_a_cause(self, domain: Domain):
        scored(domain)
        broken = eval_failed(domain)
        Rollout.objects.update(run=domain.run)
        asked = rescore_run(project=domain.project, run_id=domain.run.id, only_cause=Cause.EVALUATION_ERROR)
        assert asked == (1, 0, 0)
        assert Rescoring.objects.get().rollout == broken

    def test_of_another_project_has_nothing(self, domain: Domain):
        rollout = scored(domain)
        assert rescore_run(project=Domain("beta").project, run_id=rollout.run_id) == (0, 0, 0)


class TestCarryingOut:
    def test_asking_twice_queues_once(self, domain: Domain):
        rollout = scored(domain)
        first = rescore_rollout(project=domain.project, rollout_id=rollout.id)
        assert rescore_rollout(project=domain.project, rollout_id=rollout.id) == first
        take(domain)
        assert rescore_rollout(project=domain.project, rollout_id=rollout.id) == first

    def test_another_version_meanwhile_is_a_conflict(self, domain: Domain):
        rollout, newer = scored(domain), newer_version(domain)
        rescore_rollout(project=domain.project, rollout_id=rollout.id)
        with pytest.raises(Conflict, match="being scored with version 1"):
            rescore_rollout(project=domain.project, rollout_id=rollout.id, environment_id=newer.id)

    def test_a_claimed_one_is_not_there_for_others(self, domain: Domain):
        rescore_rollout(project=domain.project, rollout_id=scored(domain).id)
        take(domain)
        assert claim_rescorings(owner=domain.worker(Stage.EVAL).id, working_on=[], limit=10) == []

    def test_what_may_pass_is_repeated_after_a_pause_and_then_given_up(self, domain: Domain):
        rollout = scored(domain, max_infra_retries=1)
        rescore_rollout(project=domain.project, rollout_id=rollout.id)
        worker = domain.worker(Stage.EVAL)
        assert fail_rescoring(claim=take(domain, worker), failure=JUDGE_DOWN)
        assert claim_rescorings(owner=worker.id, working_on=[], limit=10) == []
        Rescoring.objects.update(not_before=None)
        assert fail_rescoring(claim=take(domain, worker), failure=JUDGE_DOWN)
        assert Rescoring.objects.get().state == "failed"
        assert refreshed(rollout).reward_version == 1

    def test_a_lost_worker_loses_it_and_can_change_nothing_any_more(self, domain: Domain):
        rollout, worker = scored(domain), domain.worker(Stage.EVAL)
        rescore_rollout(project=domain.project, rollout_id=rollout.id)
        old = take(domain, worker)
        assert take_back_rescorings() == 0
        WorkerProcess.objects.filter(id=worker.id).update(lost_at=timezone.now())
        assert take_back_rescorings() == 1
        assert not finish_rescoring(claim=old, score=RIGHT)
        assert not fail_rescoring(claim=old, failure=BROKEN)
        assert (refreshed(rollout).reward, Rescoring.objects.get().failures) == (0.0, 1)
        Rescoring.objects.update(not_before=None)
        assert finish_rescoring(claim=take(domain), score=RIGHT)
        assert not finish_rescoring(claim=old, score=WRONG)
        assert (refreshed(rollout).reward, refreshed(rollout).reward_version) == (1.0, 2)

    def test_a_stopped_worker_hands_it_back_and_no_failure_is_counted(self, domain: Domain):
        worker = domain.worker(Stage.EVAL)
        rescore_rollout(project=domain.project, rollout_id=scored(domain).id)
        take(domain, worker)
        WorkerProcess.objects.filter(id=worker.id).update(stopped_at=timezone.now())
        assert take_back_rescorings() == 1
        assert Rescoring.objects.get().failures == 0
        take(domain)

    def test_an_answer_that_never_came_is_noticed_at_the_next_claim(self, domain: Domain):
        worker = domain.worker(Stage.EVAL)
        rescore_rollout(project=domain.project, rollout_id=scored(domain).id)
        lost = take(domain, worker)
        again = take(domain, worker)
        assert (again.rescoring_id, again.tries) == (lost.rescoring_id, lost.tries + 1)
        assert claim_rescorings(owner=worker.id, working_on=[again.rescoring_id], limit=10) == []
        assert not finish_rescoring(claim=lost, score=WRONG)
        assert finish_rescoring(claim=again, score=RIGHT)


@pytest.mark.django_db(transaction=True)
def test_many_requests_and_workers_at_once_score_once():
    domain = Domain()
    rollout = scored(domain)
    workers = [domain.worker(Stage.EVAL) for _ in range(4)]
    claims: list[RescoringClaim] = []
    start = threading.Barrier(8)

    def at_once(step: Any) -> threading.Thread:
        def run() -> None:
            start.wait()
            try:
                step()
            finally:
                connection.close()

        return threading.Thread(target=run)

    def ask() -> None:
        rescore_rollout(project=domain.project, rollout_id=rollout.id)

    def claim_until_found(worker: WorkerProcess) -> None:
        deadline = timezone.now() + timedelta(seconds=20)
        while not claims and timezone.now() < deadline:
            claims.extend(claim_rescorings(owner=worker.id, working_on=[c.rescoring_id for c in claims], limit=10))

    threads = [at_once(ask) for _ in range(4)] + [at_once(lambda w=worker: claim_until_found(w)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [claim] = claims
    assert Rescoring.objects.count() == 1
    assert finish_rescoring(claim=claim, score=RIGHT)
    assert Reward.objects.filter(rollout=rollout).count() == 2
