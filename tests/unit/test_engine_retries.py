"""Which failures are repeated, how, and when it is enough."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollouts.engine.errors import Failure
from rollouts.engine.retries import GiveUp, Retry, decide
from rollouts.lifecycle import PHASES, Cause, Stage, Termination
from rollouts.run_settings import RunSettings

INIT, RUN, EVAL = Stage.INIT, Stage.RUN, Stage.EVAL
AGAIN, EVAL_AGAIN = "again", "eval again"


def outcome(stage: Stage, cause: Cause, before: dict[Stage, int], *, retryable: bool = True, **settings: Any) -> str:
    failure = Failure(Termination(PHASES[stage], cause), retryable, "")
    decision = decide(RunSettings.model_validate(settings), stage, failure, before)
    if isinstance(decision, GiveUp):
        return decision.reason
    return EVAL_AGAIN if decision.only_eval else AGAIN


@pytest.mark.parametrize(
    ("stage", "cause", "before", "settings", "expected"),
    [
        (INIT, Cause.SANDBOX_ERROR, {}, {}, AGAIN),
        (RUN, Cause.MODEL_ERROR, {}, {}, AGAIN),
        (RUN, Cause.ATTEMPT_TIMEOUT, {}, {}, AGAIN),
        (EVAL, Cause.EVALUATION_ERROR, {}, {}, EVAL_AGAIN),
        (EVAL, Cause.WORKER_LOST, {}, {}, EVAL_AGAIN),
        (EVAL, Cause.STAGE_TIMEOUT, {}, {}, EVAL_AGAIN),
        (EVAL, Cause.SANDBOX_ERROR, {}, {}, AGAIN),
        (EVAL, Cause.ATTEMPT_TIMEOUT, {}, {}, "the attempt has no time left"),
        (EVAL, Cause.CANCELLED, {}, {}, "it is not the infrastructure's failure"),
        (RUN, Cause.MODEL_ERROR, {RUN: 4}, {}, AGAIN),
        (RUN, Cause.MODEL_ERROR, {INIT: 1, RUN: 2, EVAL: 2}, {}, "settings.max_infra_retries allows 5"),
        (RUN, Cause.MODEL_ERROR, {}, {"max_infra_retries": 0}, "settings.max_infra_retries allows 0"),
        (RUN, Cause.MODEL_ERROR, {RUN: 1}, {"retries": {"run": 1}}, "settings.retries.run allows 1"),
        (INIT, Cause.SANDBOX_ERROR, {RUN: 1}, {"retries": {"run": 1}}, AGAIN),
        (EVAL, Cause.EVALUATION_ERROR, {}, {"retries": {"eval": 0}}, "settings.retries.eval allows 0"),
        (RUN, Cause.MODEL_ERROR, {}, {"retries": {"never": ["model_error"]}}, "settings.retries.never names model_error"),
        (RUN, Cause.SANDBOX_ERROR, {}, {"retries": {"never": ["model_error"]}}, AGAIN),
    ],
)
def test_a_failure_that_may_pass(
    stage: Stage, cause: Cause, before: dict[Stage, int], settings: dict[str, Any], expected: str
) -> None:
    assert outcome(stage, cause, before, **settings) == expected


@pytest.mark.parametrize(
    ("stage", "cause", "settings", "expected"),
    [
        (EVAL, Cause.EVALUATION_ERROR, {}, "it would fail again"),
        (EVAL, Cause.EVALUATION_ERROR, {"retries": {"always": ["evaluation_error"]}}, EVAL_AGAIN),
        (INIT, Cause.ENVIRONMENT_ERROR, {"retries": {"always": ["environment_error"]}}, AGAIN),
        (INIT, Cause.INVALID_TASK, {}, "it is not the infrastructure's failure"),
    ],
)
def test_a_failure_that_looks_permanent(stage: Stage, cause: Cause, settings: dict[str, Any], expected: str) -> None:
    assert outcome(stage, cause, {}, retryable=False, **settings) == expected


def test_a_sandbox_that_can_be_rebuilt_does_not_cost_a_run() -> None:
    failure = Failure(Termination(PHASES[EVAL], Cause.SANDBOX_ERROR), True, "")
    assert decide(RunSettings(), EVAL, failure, {}, restores=True) == Retry(0.5, only_eval=True)
    assert decide(RunSettings(), RUN, failure, {}, restores=True) == Retry(0.5, only_eval=False)


def test_pauses_double_up_to_a_minute() -> None:
    failure = Failure(Termination(PHASES[RUN], Cause.MODEL_ERROR), True, "")
    settings = RunSettings(max_infra_retries=100)
    decisions = [decide(settings, RUN, failure, {INIT: n // 2, RUN: n - n // 2}) for n in range(9)]
    assert [d.after_seconds for d in decisions if isinstance(d, Retry)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    ("retries", "pointer", "complaint"),
    [
        ({"never": ["max_turns"]}, ("retries", "never"), "no failure of the infrastructure"),
        ({"never": ["model_error"], "always": ["model_error"]}, ("retries", "always"), "stands in `never` as well"),
        ({"never": ["no such cause"]}, ("retries", "never", 0), "Input should be"),
        ({"init": -1}, ("retries", "init"), "greater than or equal to 0"),
        ({"queue": 1}, ("retries", "queue"), "Extra inputs"),
    ],
)
def test_settings_that_make_no_sense_are_refused(retries: dict[str, Any], pointer: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RunSettings.model_validate({"retries": retries})
    [error] = refused.value.errors()
    assert error["loc"] == pointer
    assert complaint in error["msg"]


def test_an_attempt_that_has_no_room_for_the_agent_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"timeouts.attempt\n.*raise it, or lower `agent`"):
        RunSettings.model_validate({"timeouts": {"agent": 600, "attempt": 300}})
