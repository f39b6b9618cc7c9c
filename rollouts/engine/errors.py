"""What can end a rollout besides its policy, named after the boundary that failed, and the one place that turns it into data.

    boundary          what it raises                              cause
    model server      llm.errors.ModelError                       MODEL_ERROR
    sandbox           sandboxes.errors.SandboxError               SANDBOX_ERROR
    its limits        sandboxes.errors.LimitExceeded              ENVIRONMENT_ERROR, in EVAL EVALUATION_ERROR (1)
    environment code  anything; the stages wrap it                ENVIRONMENT_ERROR, in EVAL EVALUATION_ERROR
    stage deadline    StageTimedOut                               STAGE_TIMEOUT
    attempt deadline  AttemptTimedOut                             ATTEMPT_TIMEOUT
    store             StoreFailed                                 INTERNAL_ERROR
    lease             AttemptSuperseded                           WORKER_LOST
    task, registry    ValidationFailed, UnknownEnvironment        INVALID_TASK

(1) In RUN it is no error: what the agent did ended its sandbox, so the outcome says SANDBOX_LIMIT and what is left is scored.

A bad rollout is data: every worker catches `Exception` once, around a whole stage, and stores what `classify` makes of it.
Cancellation is not an error and passes through everything here.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple

from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment, ValidationFailed
from rollouts.lifecycle import Cause, Phase, Termination
from rollouts.llm.errors import ModelError
from sandboxes.errors import LimitExceeded, SandboxError

_DETAIL_CHARS = 500
_TRACEBACK_CHARS = 20_000


class EnvironmentFailed(Exception):
    """The environment's own code failed outside evaluation. `retryable` says whether the same task may work next time."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class EvaluationFailed(Exception):
    """Scoring failed; the reward is null. `retryable` is for what may pass, such as a judge that answered 503."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class StageTimedOut(Exception):
    """INIT or EVAL exceeded its budget. (The agent's own budget ends in a `RunOutcome`.)"""


class AttemptTimedOut(Exception):
    """All stages of the attempt together exceeded its budget: what came before took too long, not the policy."""


class StoreFailed(Exception):
    """What happened could not be stored, so the rollout must not go on."""


class AttemptSuperseded(Exception):
    """This attempt lost its lease: another one owns the rollout, and nothing this one writes counts any more."""


class Failure(NamedTuple):
    """What the store needs to know of a failed stage. `traceback` is for the attempt's row, bounded, with its causes."""

    termination: Termination
    retryable: bool
    traceback: str


def classify(exc: Exception, phase: Phase) -> Failure:
    """Turn what escaped a stage into a typed termination.

    An exception of an unknown type is a defect of this platform: the stages have wrapped whatever environment code raised.
    """
    cause, retryable = _cause(exc, phase)
    return Failure(
        termination=Termination(phase, cause, describe(exc)),
        retryable=retryable,
        traceback="".join(traceback.format_exception(exc))[-_TRACEBACK_CHARS:],
    )


def stuck(phase: Phase) -> Failure:
    """A stage went on far beyond its deadline: something in it does not let itself be interrupted."""
    detail = "it went on far past its deadline, so something in it ignores being interrupted or blocks its thread"
    return Failure(Termination(phase, Cause.STAGE_TIMEOUT, detail), retryable=True, traceback="")


def describe(exc: BaseException) -> str:
    """One line about an exception, at most 500 characters long."""
    first_line = next(iter(str(exc).splitlines()), "")
    text = f"{type(exc).__name__}: {first_line}" if first_line else type(exc).__name__
    return text if len(text) <= _DETAIL_CHARS else text[: _DETAIL_CHARS - 1] + "…"


def _cause(exc: Exception, phase: Phase) -> tuple[Cause, bool]:
    match exc:
        case LimitExceeded() if phase is Phase.INIT:
            return Cause.ENVIRONMENT_ERROR, False
        case LimitExceeded() if phase is Phase.EVAL:
            return Cause.EVALUATION_ERROR, False
        case ModelError():
            return Cause.MODEL_ERROR, exc.retryable
        case SandboxError():
            return Cause.SANDBOX_ERROR, True
        case EnvironmentFailed():
            return Cause.ENVIRONMENT_ERROR, exc.retryable
        case EvaluationFailed():
            return Cause.EVALUATION_ERROR, exc.retryable
        case StageTimedOut():
            return Cause.STAGE_TIMEOUT, True
        case AttemptTimedOut():
            return Cause.ATTEMPT_TIMEOUT, True
        case StoreFailed():
            return Cause.INTERNAL_ERROR, True
        case AttemptSuperseded():
            return Cause.WORKER_LOST, False
        case ValidationFailed() | UnknownEnvironment():
            return Cause.INVALID_TASK, False
        case BrokenEnvironment():
            return Cause.ENVIRONMENT_ERROR, False
        case _:
            return Cause.INTERNAL_ERROR, False


def first_leaf(exc: Exception) -> Exception:
    """Task groups wrap what their tasks raise; the first one is why the others were cancelled."""
    while isinstance(exc, ExceptionGroup):
        exc = exc.exceptions[0]
    return exc
