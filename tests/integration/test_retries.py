"""Every failure of a stage is kept: where, of whom, why, and what was done about it."""

from __future__ import annotations

import pytest

from rollouts.engine.errors import Failure
from rollouts.engine.records import RunOutcome
from rollouts.environments.base import RewardComponent, Score
from rollouts.lifecycle import PHASES, Cause, Fidelity, Phase, Stage, State, Termination
from rollouts.models import Rollout, StageFailure, WorkerProcess
from rollouts.services.finish import Scored, fail, finish_scored
from rollouts.services.progress import Initialized, Ran, hand_over_for_evaluation, hand_over_ready
from rollouts.services.reap import reap
from tests.integration.api_case import ApiCase
from tests.integration.domain import Domain
from tests.integration.test_dispatch_and_reap import lose


def failure(stage: Stage, cause: Cause, *, retryable: bool = True) -> Failure:
    return Failure(Termination(PHASES[stage], cause, f"{cause.value} happened"), retryable, f"Traceback: {cause.value}")


def due(rollout: Rollout) -> Rollout:
    """The backoff is over."""
    Rollout.objects.filter(id=rollout.id).update(not_before=None)
    return Rollout.objects.get(id=rollout.id)


def to_eval(domain: Domain, rollout: Rollout) -> None:
    assert all(hand_over_ready([Initialized(domain.claim(due(rollout), Stage.INIT), "")]))
    outcome = RunOutcome(Termination(Phase.RUN, Cause.MAX_TURNS, "as RUN said"), {"answer": "3"}, Fidelity.TOKEN_EXACT)
    assert all(hand_over_for_evaluation([Ran(domain.claim(rollout, Stage.RUN), outcome)]))


def test_each_failure_is_a_row_with_who_where_and_why(domain: Domain):
    rollout = domain.submit()[0]
    worker = domain.worker(Stage.INIT, node="gpu-03")
    fail(claim=domain.claim(rollout, Stage.INIT, worker), failure=failure(Stage.INIT, Cause.SANDBOX_ERROR))
    row = StageFailure.objects.get()
    assert (row.rollout_id, row.attempt, row.stage, row.retried_as) == (rollout.id, 1, "init", "requeued")
    assert (row.worker, row.node, row.pid) == (worker.id, "gpu-03", worker.pid)
    assert (row.cause, row.blame) == ("sandbox_error", "infrastructure")
    assert (row.detail, row.traceback) == ("sandbox_error happened", "Traceback: sandbox_error")


def test_eval_is_repeated_without_run_and_each_of_its_failures_is_kept(domain: Domain):
    rollout = domain.submit()[0]
    to_eval(domain, rollout)
    for _ in range(2):
        fail(claim=domain.claim(due(rollout), Stage.EVAL), failure=failure(Stage.EVAL, Cause.EVALUATION_ERROR))
    claim = domain.claim(due(rollout), Stage.EVAL)
    assert (claim.attempt, claim.artefacts, claim.termination_cause) == (1, {"answer": "3"}, "max_turns")
    assert all(finish_scored([Scored(claim, Score([RewardComponent("correct", 1.0)]))]))
    rows = StageFailure.objects.filter(rollout=rollout)
    assert [(row.attempt, row.stage, row.retried_as) for row in rows] == [(1, "eval", "eval_again")] * 2
    assert due(rollout).infra_retries == 2


def test_a_stage_has_its_own_bound(domain: Domain):
    rollout = domain.submit(run=domain.new_run(retries={"eval": 1}))[0]
    fail(claim=domain.claim(rollout, Stage.INIT), failure=failure(Stage.INIT, Cause.SANDBOX_ERROR))
    to_eval(domain, rollout)
    for _ in range(2):
        fail(claim=domain.claim(due(rollout), Stage.EVAL), failure=failure(Stage.EVAL, Cause.EVALUATION_ERROR))
    rows = StageFailure.objects.filter(rollout=rollout)
    assert [row.retried_as for row in rows] == ["requeued", "eval_again", "gave_up"]
    ended = due(rollout)
    assert (ended.state, ended.reward, ended.run_cause, ended.run_detail) == ("failed", None, "max_turns", "as RUN said")
    assert ended.events.latest("id").data["not_repeated"] == "settings.retries.eval allows 1"


def test_causes_can_be_excluded_or_included(domain: Domain):
    never = domain.submit(run=domain.new_run(retries={"never": ["sandbox_error"]}))[0]
    fail(claim=domain.claim(never, Stage.INIT), failure=failure(Stage.INIT, Cause.SANDBOX_ERROR))
    always = domain.submit(run=domain.new_run(retries={"always": ["environment_error"]}))[0]
    broken = failure(Stage.INIT, Cause.ENVIRONMENT_ERROR, retryable=False)
    fail(claim=domain.claim(always, Stage.INIT), failure=broken)
    assert (due(never).state, due(always).state) == ("failed", "queued")


def test_a_late_failure_of_an_old_attempt_leaves_no_row(domain: Domain):
    rollout = domain.submit()[0]
    old = domain.claim(rollout, Stage.INIT)
    fail(claim=old, failure=failure(Stage.INIT, Cause.SANDBOX_ERROR))
    fail(claim=old, failure=failure(Stage.INIT, Cause.SANDBOX_ERROR))
    assert StageFailure.objects.count() == 1


@pytest.mark.parametrize("state", [State.INITIALIZING, State.RUNNING, State.EVALUATING])
def test_a_lost_worker_is_a_failure_of_its_stage(domain: Domain, state: State):
    rollout = domain.rollout_in(state)
    owner = WorkerProcess.objects.get(id=rollout.lease_owner_id)
    lose(owner)
    reap()
    row = StageFailure.objects.get()
    assert (row.stage, row.cause, row.worker, row.pid) == (owner.stage, "worker_lost", owner.id, owner.pid)
    assert row.retried_as == ("eval_again" if state is State.EVALUATING else "requeued")


@pytest.mark.django_db
def test_the_api_tells_the_history(db: None):
    case = ApiCase()
    rollout = case.domain.submit()[0]
    fail(claim=case.domain.claim(rollout, Stage.INIT), failure=failure(Stage.INIT, Cause.SANDBOX_ERROR))
    to_eval(case.domain, rollout)
    fail(claim=case.domain.claim(rollout, Stage.EVAL), failure=failure(Stage.EVAL, Cause.EVALUATION_ERROR))
    first, second = case.check_read_access(f"/api/v1/rollouts/{rollout.id}/attempts/")["attempts"]
    assert (first["number"], first["outcome"], first["failures"][0]["cause"]) == (1, "queued", "sandbox_error")
    [again] = second["failures"]
    assert (again["stage"], again["retried_as"], again["traceback"]) == ("eval", "eval_again", "Traceback: evaluation_error")
