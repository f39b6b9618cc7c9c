"""What counts against the budget of a whole attempt: the time that workers held it, and nothing else."""

from __future__ import annotations

from django.db.models.expressions import RawSQL

from rollouts.engine.errors import Failure
from rollouts.engine.records import RunOutcome
from rollouts.lifecycle import Cause, Fidelity, Phase, Stage, Termination
from rollouts.models import Rollout
from rollouts.services.claim import Claim
from rollouts.services.finish import fail
from rollouts.services.progress import Initialized, Ran, hand_over_for_evaluation, hand_over_ready
from tests.integration.domain import Domain

DONE = RunOutcome(Termination(Phase.RUN, Cause.COMPLETED), {"answer": "3"}, Fidelity.TOKEN_EXACT)
JUDGE_DOWN = Failure(Termination(Phase.EVAL, Cause.EVALUATION_ERROR, "judge 503"), retryable=True, traceback="")


def later(rollout: Rollout, seconds: float) -> None:
    """Let time pass since the rollout's last move."""
    since = RawSQL("now() - %s * interval '1 second'", [seconds])  # by the clock that moves go by
    Rollout.objects.filter(id=rollout.id).update(state_changed_at=since, not_before=None)


def claim_after_waiting(domain: Domain, rollout: Rollout, stage: Stage) -> Claim:
    later(rollout, 1000)
    return domain.claim(rollout, stage)


def test_only_held_time_counts_over_stages_and_tries(domain: Domain):
    rollout = domain.submit()[0]
    first = claim_after_waiting(domain, rollout, Stage.INIT)
    later(rollout, 10)
    assert all(hand_over_ready([Initialized(first, "")]))
    running = claim_after_waiting(domain, rollout, Stage.RUN)
    assert running.held_seconds == 10
    later(rollout, 300)
    assert all(hand_over_for_evaluation([Ran(running, DONE)]))
    evaluating = claim_after_waiting(domain, rollout, Stage.EVAL)
    assert evaluating.held_seconds == 310
    later(rollout, 300)
    fail(claim=evaluating, failure=JUDGE_DOWN)
    assert claim_after_waiting(domain, rollout, Stage.EVAL).held_seconds == 610


def test_a_new_attempt_has_the_whole_budget_again(domain: Domain):
    rollout = domain.submit()[0]
    lost = Failure(Termination(Phase.INIT, Cause.ATTEMPT_TIMEOUT), retryable=True, traceback="")
    held = domain.claim(rollout, Stage.INIT)
    later(rollout, 300)
    fail(claim=held, failure=lost)
    later(rollout, 0)
    again = domain.claim(rollout, Stage.INIT)
    assert (again.attempt, again.held_seconds) == (2, 0)
