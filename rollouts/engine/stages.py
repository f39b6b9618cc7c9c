"""The three stages of a rollout as functions of plain inputs, with their deadlines. No database, no jobs.

Whatever environment code raises leaves here as `EnvironmentFailed` or `EvaluationFailed`; failures of other boundaries (model,
sandbox, store, lease) and cancellation pass through as they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollouts.engine.errors import (
    AttemptSuperseded,
    EnvironmentFailed,
    EvaluationFailed,
    StageTimedOut,
    StoreFailed,
    describe,
    first_leaf,
)
from rollouts.engine.records import RunOutcome
from rollouts.engine.scores import check_score
from rollouts.environments.base import Environment, EvalContext, InitContext, RunContext, Score
from rollouts.lifecycle import Cause, Phase, Stage, Termination
from rollouts.llm.errors import ContextOverflow, ModelError
from sandboxes.errors import SandboxError, SandboxFileError

_PASSED_ON = (ModelError, SandboxError, StoreFailed, AttemptSuperseded, EnvironmentFailed, EvaluationFailed)

Context = TypeVar("Context")
Result = TypeVar("Result")


async def init_stage(env: Environment, ctx: InitContext, *, timeout: float) -> None:
    """Let the environment prepare the sandbox. `timeout` is in seconds; raises `StageTimedOut` after it."""
    try:
        await _within(timeout, env.initialize, ctx, EnvironmentFailed)
    except _DeadlineExpired as exc:
        raise StageTimedOut(f"{Stage.INIT} exceeded its {timeout:g} s") from exc


async def run_stage(env: Environment, ctx: RunContext, *, agent_timeout: float) -> RunOutcome:
    """Carry out the episode. When `agent_timeout` (seconds) runs out, the outcome says so and keeps the artefacts so far."""
    try:
        termination = await _within(agent_timeout, env.run, ctx, EnvironmentFailed)
    except _DeadlineExpired:
        termination = Termination(Phase.RUN, Cause.AGENT_TIMEOUT, f"the agent's {agent_timeout:g} s ran out")
    except ContextOverflow as exc:  # of an environment that samples without the shipped agent
        termination = Termination(Phase.RUN, Cause.CONTEXT_OVERFLOW, str(exc))
    if not isinstance(termination, Termination):
        raise EnvironmentFailed(f"run returned a {type(termination).__name__}, not a Termination")
    try:
        json.dumps(ctx.artefacts, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise EnvironmentFailed(f"artefacts are not JSON: {describe(exc)}") from exc
    return RunOutcome(termination, ctx.artefacts, ctx.conversation.fidelity)


async def eval_stage(env: Environment, ctx: EvalContext, *, timeout: float) -> Score:
    """Score the artefacts. `timeout` is in seconds; raises `StageTimedOut` after it, `EvaluationFailed` for a bad score."""
    try:
        return check_score(await _within(timeout, env.evaluate, ctx, EvaluationFailed))
    except _DeadlineExpired as exc:
        raise StageTimedOut(f"{Stage.EVAL} exceeded its {timeout:g} s") from exc


class _DeadlineExpired(Exception):
    """Time ran out."""


async def _within(
    seconds: float,
    method: Callable[[Context], Awaitable[Result]],
    ctx: Context,
    failure: type[EnvironmentFailed] | type[EvaluationFailed],
) -> Result:
    """Call environment code for at most `seconds`.

    After that it raises `_DeadlineExpired`, whatever the code made of being cancelled.
    """
    try:
        async with asyncio.timeout(seconds) as deadline:
            result = await method(ctx)
    except Exception as exc:
        if deadline.expired():
            raise _DeadlineExpired from exc
        origin = first_leaf(exc)
        if isinstance(origin, SandboxFileError):  # it asked for the wrong path; the sandbox is well
            raise failure(describe(origin)) from exc
        if isinstance(origin, (*_PASSED_ON, ContextOverflow)):
            raise origin from exc if origin is not exc else origin.__cause__
        raise failure(describe(origin)) from exc
    if deadline.expired():
        raise _DeadlineExpired
    return result
