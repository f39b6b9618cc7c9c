"""The three stages: deadlines, what may come out of environment code, and what is made of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.deadlines import Deadline
from rollouts.engine.errors import EnvironmentFailed, EvaluationFailed, StageTimedOut
from rollouts.engine.records import TurnRecord
from rollouts.engine.stages import eval_stage, init_stage, run_stage
from rollouts.environments.base import (
    EnvironmentConfig,
    EvalContext,
    InitContext,
    PlainEnvironment,
    RewardComponent,
    RunContext,
    Score,
    TaskPayload,
)
from rollouts.lifecycle import Cause, Fidelity, Phase, Termination
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.errors import ModelError
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import Sampling, ServerAddress
from sandboxes.errors import LimitExceeded, SandboxFileError, SandboxLost

COMPLETED = Termination(Phase.RUN, Cause.COMPLETED)

Step = Callable[[Any], Awaitable[Any]]


def within(seconds: float) -> Deadline:
    return Deadline.after(seconds, f"the test's {seconds:g} s")


class Scenario(PlainEnvironment):
    """An environment whose every method is the given step."""

    def __init__(self, step: Step) -> None:
        self._step = step

    async def initialize(self, ctx: InitContext) -> None:
        await self._step(ctx)

    async def run(self, ctx: RunContext) -> Any:
        return await self._step(ctx)

    async def evaluate(self, ctx: EvalContext) -> Any:
        return await self._step(ctx)


class Recording:
    """A store in memory."""

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []

    async def turn(self, record: TurnRecord) -> None:
        self.turns.append(record)


@pytest.fixture
async def run_context() -> AsyncIterator[RunContext]:
    client = ModelClient()
    async with ScriptedServer() as server:
        address = ServerAddress(server.url, server.model, "policy", 0, 8192)
        conversation = Conversation(client, FixedRoute(address), Sampling(), call_timeout=30.0)
        yield RunContext(EnvironmentConfig(), TaskPayload(), None, conversation, Recording())
        await client.close()


INIT = InitContext(EnvironmentConfig(), TaskPayload(), None)
EVAL = EvalContext(EnvironmentConfig(), TaskPayload(), {"answer": "4"}, None)


def returning(value: Any) -> Step:
    async def step(ctx: Any) -> Any:
        return value

    return step


def raising(exc: Exception) -> Step:
    async def step(ctx: Any) -> Any:
        raise exc

    return step


async def hang(ctx: Any) -> Any:
    await asyncio.Event().wait()


async def hang_and_swallow(ctx: Any) -> Any:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return Score([RewardComponent("correct", 1.0)])


async def hang_and_complain(ctx: Any) -> Any:
    try:
        await asyncio.Event().wait()
    finally:
        raise RuntimeError("cleaning up failed")


@pytest.mark.parametrize("step", [hang, hang_and_swallow, hang_and_complain])
async def test_init_and_eval_end_at_their_deadline_whatever_the_code_makes_of_it(step: Step) -> None:
    with pytest.raises(StageTimedOut, match=r"the test.s 0.02 s ran out"):
        await init_stage(Scenario(step), INIT, deadline=within(0.02))
    with pytest.raises(StageTimedOut, match=r"the test.s 0.02 s ran out"):
        await eval_stage(Scenario(step), EVAL, deadline=within(0.02))


@pytest.mark.parametrize("step", [hang, hang_and_swallow, hang_and_complain])
async def test_the_agents_deadline_is_an_outcome(run_context: RunContext, step: Step) -> None:
    outcome = await run_stage(Scenario(step), run_context, deadline=within(0.02))

    assert outcome.termination.cause is Cause.AGENT_TIMEOUT


@pytest.mark.parametrize(
    "exc", [KeyError("gold"), TimeoutError("of its own"), AssertionError(), SandboxFileError("not_found", "/x", "x")]
)
async def test_what_environment_code_raises_is_the_environments_failure(run_context: RunContext, exc: Exception) -> None:
    scenario = Scenario(raising(exc))
    with pytest.raises(EnvironmentFailed, match=type(exc).__name__) as in_init:
        await init_stage(scenario, INIT, deadline=within(5))
    with pytest.raises(EnvironmentFailed, match=type(exc).__name__):
        await run_stage(scenario, run_context, deadline=within(5))
    with pytest.raises(EvaluationFailed, match=type(exc).__name__) as in_eval:
        await eval_stage(scenario, EVAL, deadline=within(5))
    assert not in_init.value.retryable and not in_eval.value.retryable


@pytest.mark.parametrize(
    "exc", [SandboxLost("gone"), ModelError("503", retryable=True), EvaluationFailed("judge down", retryable=True)]
)
async def test_failures_of_other_boundaries_pass_as_they_are(run_context: RunContext, exc: Exception) -> None:
    scenario = Scenario(raising(exc))
    for stage in (
        init_stage(scenario, INIT, deadline=within(5)),
        run_stage(scenario, run_context, deadline=within(5)),
        eval_stage(scenario, EVAL, deadline=within(5)),
    ):
        with pytest.raises(type(exc)) as raised:
            await stage
        assert raised.value is exc


async def test_they_are_also_found_in_the_group_a_task_group_raises() -> None:
    async def grouped(ctx: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())
            group.create_task(raising(SandboxLost("gone"))(ctx))  # type: ignore[arg-type]

    with pytest.raises(SandboxLost):
        await eval_stage(Scenario(grouped), EVAL, deadline=within(5))


async def test_cancellation_passes(run_context: RunContext) -> None:
    started = asyncio.Event()

    async def wait(ctx: Any) -> Any:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run_stage(Scenario(wait), run_context, deadline=within(60)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_run_that_ends_by_itself(run_context: RunContext) -> None:
    async def run(ctx: RunContext) -> Termination:
        ctx.artefacts["answer"] = "4"
        return COMPLETED

    outcome = await run_stage(Scenario(run), run_context, deadline=within(5))

    assert (outcome.termination, outcome.artefacts, outcome.fidelity) == (COMPLETED, {"answer": "4"}, Fidelity.TOKEN_EXACT)


async def test_what_there_was_when_the_agents_time_ran_out_is_kept(run_context: RunContext) -> None:
    async def run(ctx: RunContext) -> Termination:
        agent = Agent(ctx.conversation, [], AgentSettings(), ctx.recorder)
        try:
            return await agent.run([{"role": "user", "content": "[[delay:30]]"}])
        finally:
            ctx.artefacts["answer"] = agent.final_text

    outcome = await run_stage(Scenario(run), run_context, deadline=within(0.3))

    assert outcome.termination.cause is Cause.AGENT_TIMEOUT
    assert outcome.artefacts == {"answer": ""}
    assert isinstance(run_context.recorder, Recording)
    [turn] = run_context.recorder.turns
    assert [m.content for m in turn.messages] == ["[[delay:30]]"]


async def test_a_context_overflow_outside_the_shipped_agent_is_the_policys(run_context: RunContext) -> None:
    async def run(ctx: RunContext) -> Any:
        ctx.conversation.append({"role": "user", "content": "x" * 100_000})
        await ctx.conversation.sample(0)

    outcome = await run_stage(Scenario(run), run_context, deadline=within(5))

    assert outcome.termination.cause is Cause.CONTEXT_OVERFLOW


async def test_a_sandbox_ended_for_what_ran_inside_is_the_policys(run_context: RunContext) -> None:
    async def run(ctx: RunContext) -> Any:
        try:
            async with asyncio.TaskGroup():
                raise LimitExceeded("wall_seconds", "x: ended after 60 s")
        finally:
            ctx.artefacts["answer"] = "so far"

    outcome = await run_stage(Scenario(run), run_context, deadline=within(5))

    assert outcome.termination == Termination(Phase.RUN, Cause.SANDBOX_LIMIT, "wall_seconds: x: ended after 60 s")
    assert outcome.artefacts == {"answer": "so far"}


async def test_a_run_must_return_a_termination(run_context: RunContext) -> None:
    with pytest.raises(EnvironmentFailed, match="NoneType"):
        await run_stage(Scenario(returning(None)), run_context, deadline=within(5))


@pytest.mark.parametrize("value", [b"bytes", float("nan"), object()])
async def test_artefacts_must_be_json(run_context: RunContext, value: object) -> None:
    async def run(ctx: RunContext) -> Termination:
        ctx.artefacts["patch"] = value
        return COMPLETED

    with pytest.raises(EnvironmentFailed, match="not JSON"):
        await run_stage(Scenario(run), run_context, deadline=within(5))


async def test_a_good_score_is_returned() -> None:
    score = Score([RewardComponent("correct", 1), RewardComponent("style", None, weight=0.5)])

    assert await eval_stage(Scenario(returning(score)), EVAL, deadline=within(5)) is score


@pytest.mark.parametrize(
    ("score", "complaint"),
    [
        (1.0, "not a Score"),
        (None, "not a Score"),
        (Score([]), "no components"),
        (Score([RewardComponent("a", float("nan"))]), "nan"),
        (Score([RewardComponent("a", float("-inf"))]), "-inf"),
        (Score([RewardComponent("a", True)]), "True"),
        (Score([RewardComponent("a", "1")]), "'1'"),  # type: ignore[arg-type]
        (Score([RewardComponent("a", 1.0, weight=float("inf"))]), "weight"),
        (Score([RewardComponent("", 1.0)]), "named"),
        (Score([RewardComponent("a", 1.0), RewardComponent("a", 0.0)]), "two reward components"),
        (Score(["a"]), "not a RewardComponent"),  # type: ignore[list-item]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_score_is_refused(score: Any, complaint: str) -> None:
    with pytest.raises(EvaluationFailed, match=complaint):
        await eval_stage(Scenario(returning(score)), EVAL, deadline=within(5))
