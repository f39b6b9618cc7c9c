"""Whatever escapes a stage becomes one typed termination."""

from __future__ import annotations

import pytest

from rollouts.engine.errors import (
    AttemptSuperseded,
    EnvironmentFailed,
    EvaluationFailed,
    StageTimedOut,
    StoreFailed,
    classify,
)
from rollouts.environments.errors import BrokenEnvironment, Problem, UnknownEnvironment, ValidationFailed
from rollouts.lifecycle import Blame, Cause, Phase
from rollouts.llm.errors import ModelError
from sandboxes.errors import LimitExceeded, SandboxLost, SandboxStartFailed


@pytest.mark.parametrize(
    ("exc", "cause", "blame", "retryable"),
    [
        (ModelError("503", retryable=True), Cause.MODEL_ERROR, Blame.INFRASTRUCTURE, True),
        (ModelError("no such model", retryable=False), Cause.MODEL_ERROR, Blame.INFRASTRUCTURE, False),
        (SandboxLost("gone"), Cause.SANDBOX_ERROR, Blame.INFRASTRUCTURE, True),
        (SandboxStartFailed("no"), Cause.SANDBOX_ERROR, Blame.INFRASTRUCTURE, True),
        (LimitExceeded("memory_mb", "too much"), Cause.EVALUATION_ERROR, Blame.INFRASTRUCTURE, False),
        (EnvironmentFailed("bug"), Cause.ENVIRONMENT_ERROR, Blame.INFRASTRUCTURE, False),
        (EnvironmentFailed("mirror down", retryable=True), Cause.ENVIRONMENT_ERROR, Blame.INFRASTRUCTURE, True),
        (EvaluationFailed("bug"), Cause.EVALUATION_ERROR, Blame.INFRASTRUCTURE, False),
        (EvaluationFailed("judge answered 503", retryable=True), Cause.EVALUATION_ERROR, Blame.INFRASTRUCTURE, True),
        (StageTimedOut("EVAL"), Cause.STAGE_TIMEOUT, Blame.INFRASTRUCTURE, True),
        (StoreFailed("disk full"), Cause.INTERNAL_ERROR, Blame.INFRASTRUCTURE, True),
        (AttemptSuperseded("2"), Cause.WORKER_LOST, Blame.INFRASTRUCTURE, False),
        (ValidationFailed([Problem("/a", "is missing")]), Cause.INVALID_TASK, Blame.CALLER, False),
        (UnknownEnvironment("chess"), Cause.INVALID_TASK, Blame.CALLER, False),
        (BrokenEnvironment("chess"), Cause.ENVIRONMENT_ERROR, Blame.INFRASTRUCTURE, False),
        (ZeroDivisionError("ours"), Cause.INTERNAL_ERROR, Blame.INFRASTRUCTURE, False),
        (TimeoutError(), Cause.INTERNAL_ERROR, Blame.INFRASTRUCTURE, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_boundary_has_its_cause(exc: Exception, cause: Cause, blame: Blame, retryable: bool) -> None:
    failure = classify(exc, Phase.EVAL)

    assert (failure.termination.phase, failure.termination.cause) == (Phase.EVAL, cause)
    assert failure.termination.blame is blame
    assert failure.retryable is retryable


@pytest.mark.parametrize(
    ("phase", "cause", "retryable"),
    [
        (Phase.INIT, Cause.ENVIRONMENT_ERROR, False),
        (Phase.RUN, Cause.SANDBOX_ERROR, True),  # before the agent ran: what it did itself is no error (see run_stage)
        (Phase.EVAL, Cause.EVALUATION_ERROR, False),
    ],
)
def test_a_limit_of_the_sandbox_is_the_environments_failure(phase: Phase, cause: Cause, retryable: bool) -> None:
    failure = classify(LimitExceeded("memory_mb", "the sandbox ended"), phase)

    assert (failure.termination.cause, failure.retryable) == (cause, retryable)
    assert failure.termination.blame is Blame.INFRASTRUCTURE


def test_the_detail_is_one_short_line_and_the_traceback_tells_the_story() -> None:
    def fail() -> None:
        try:
            raise KeyError("gold")
        except KeyError as exc:
            raise EvaluationFailed("first line " + "x" * 1000 + "\nsecond line") from exc

    try:
        fail()
    except EvaluationFailed as exc:
        failure = classify(exc, Phase.EVAL)

    detail = failure.termination.detail
    assert detail.startswith("EvaluationFailed: first line") and "\n" not in detail and len(detail) == 500
    assert "KeyError: 'gold'" in failure.traceback and "in fail" in failure.traceback


def test_a_huge_traceback_keeps_its_end() -> None:
    failure = classify(EnvironmentFailed("y" * 100_000 + " the end"), Phase.RUN)

    assert len(failure.traceback) <= 20_000
    assert failure.traceback.rstrip().endswith("the end")


def test_an_exception_without_a_message_is_named() -> None:
    assert classify(TimeoutError(), Phase.INIT).termination.detail == "TimeoutError"
