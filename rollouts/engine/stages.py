"""The three stages of a rollout as functions of plain inputs, with their deadlines. No database, no jobs.

Whatever environment code raises leaves here as `EnvironmentFailed` or `EvaluationFailed`; failures of other boundaries (model,
sandbox, store, lease) and cancellation pass through as they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollouts.engine.budget import Budget
from rollouts.engine.deadlines import Deadline
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
from rollouts.environments.base import Environment, EvalContext, InitContext, RestoresSandbox, RunContext, Score
from rollouts.lifecycle import Cause, Phase, Termination
from rollouts.llm.errors import ContextOverflow, ModelError
from sandboxes.errors import LimitExceeded, SandboxError, SandboxFileError, SandboxLost
from sandboxes.protocol import Session

_PASSED_ON = (ModelError, SandboxError, StoreFailed, AttemptSuperseded, EnvironmentFailed, EvaluationFailed)

Context = TypeVar("Context")
Result = TypeVar("Result")


async def init_stage(env: Environment, ctx: InitContext, *, deadline: Deadline) -> None:
    """Let the environment prepare the sandbox. Raises `StageTimedOut` or `AttemptTimedOut` at the deadline."""
    await _within(deadline, env.initialize, ctx, EnvironmentFailed)


async def run_stage(
    env: Environment, ctx: RunContext, *, deadline: Deadline, action_timeout: float | None = None
) -> RunOutcome:
    """Carry out the episode.

    When the agent's time runs out, or its sandbox is ended because of what it did, the outcome says so and keeps the artefacts
    so far. A sandbox that is lost otherwise ends the stage at once. `action_timeout` bounds one tool call (seconds), where the
    environment allows more. Raises `AttemptTimedOut` when the deadline is that of the whole attempt: then INIT took what was
    the agent's.
    """
    ctx.budget = Budget(deadline, ctx.conversation, action_timeout)
    try:
        termination = await _within(deadline, _run_with_budget(env), ctx, EnvironmentFailed)
    except StageTimedOut as exc:
        termination = Termination(Phase.RUN, Cause.AGENT_TIMEOUT, str(exc))
    except LimitExceeded as exc:  # what the agent did ended its sandbox
        termination = Termination(Phase.RUN, Cause.SANDBOX_LIMIT, f"{exc.limit}: {exc}")
    except ContextOverflow as exc:  # of an environment that samples without the shipped agent
        termination = Termination(Phase.RUN, Cause.CONTEXT_OVERFLOW, str(exc))
    if not isinstance(termination, Termination):
        raise EnvironmentFailed(f"run returned a {type(termination).__name__}, not a Termination")
    try:
        json.dumps(ctx.artefacts, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise EnvironmentFailed(f"artefacts are not JSON: {describe(exc)}") from exc
    of_agent = ctx.gateway.fidelity if ctx.gateway is not None else None
    return RunOutcome(termination, ctx.artefacts, of_agent or ctx.conversation.fidelity)


async def eval_stage(env: Environment, ctx: EvalContext, *, deadline: Deadline) -> Score:
    """Score the artefacts. Raises `StageTimedOut` or `AttemptTimedOut` at the deadline, `EvaluationFailed` for a bad score."""
    return check_score(await _within(deadline, env.evaluate, ctx, EvaluationFailed))


async def restore_stage(env: RestoresSandbox, ctx: EvalContext, *, deadline: Deadline) -> None:
    """Rebuild in a fresh sandbox what RUN had left there. Raises as `eval_stage` does."""
    await _within(deadline, env.restore, ctx, EvaluationFailed)


def _run_with_budget(env: Environment) -> Callable[[RunContext], Awaitable[Termination]]:
    async def run(ctx: RunContext) -> Termination:
        if ctx.sandbox is None:
            return await env.run(ctx)
        try:
            await ctx.sandbox.set_env(ctx.budget.variables())
        except LimitExceeded as exc:
            raise SandboxLost(f"the sandbox was ended before the agent began: {exc}") from exc
        return await _while_there(ctx.sandbox, env.run(ctx))

    return run


async def _while_there(sandbox: Session, run: Awaitable[Result]) -> Result:
    """Without its sandbox a rollout has ended, also while it waits for a model that would go on generating for it."""
    try:
        async with asyncio.TaskGroup() as group:
            loss = group.create_task(sandbox.until_lost())
            result = await run
            loss.cancel()
        return result
    except ExceptionGroup as exc:
        failure = first_leaf(exc)
    raise failure  # not within `except`: its context would be the group that it is part of, a circle


async def _within(
    deadline: Deadline,
    method: Callable[[Context], Awaitable[Result]],
    ctx: Context,
    failure: type[EnvironmentFailed] | type[EvaluationFailed],
) -> Result:
    """Call environment code until the deadline. After it, it raises the deadline's error, whatever the code made of that."""
    try:
        async with asyncio.timeout_at(deadline.at) as timeout:
            result = await method(ctx)
    except Exception as exc:
        if timeout.expired():
            raise deadline.error() from exc
        origin = first_leaf(exc)
        if isinstance(origin, SandboxFileError):  # it asked for the wrong path; the sandbox is well
            raise failure(describe(origin)) from exc
        if isinstance(origin, (*_PASSED_ON, ContextOverflow)):
            raise origin from exc if origin is not exc else origin.__cause__
        raise failure(describe(origin)) from exc
    if timeout.expired():
        raise deadline.error()
    return result
