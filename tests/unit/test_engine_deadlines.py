"""Several limits at once: the nearest one strikes and is named; and what an agent is told of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.budget import Budget, BudgetTool
from rollouts.engine.deadlines import Deadline, stage_deadline
from rollouts.engine.errors import AttemptTimedOut, StageTimedOut, classify
from rollouts.engine.stages import run_stage
from rollouts.engine.tools import ToolArguments, ToolResult
from rollouts.environments.base import EnvironmentConfig, RunContext, TaskPayload
from rollouts.lifecycle import Blame, Cause, Phase, Stage, State, final_state
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import Sampling, ServerAddress
from rollouts.run_settings import TimeoutSettings
from tests.unit.test_engine_stages import Recording, Scenario


@pytest.mark.parametrize(
    ("stage", "held_before", "limit", "of_attempt"),
    [
        (Stage.INIT, 0.0, "INIT's 120 s", False),
        (Stage.RUN, 90.0, "the agent's 600 s", False),
        (Stage.RUN, 500.0, "the attempt's 1000 s", True),
        (Stage.EVAL, 690.0, "EVAL's 120 s", False),
        (Stage.EVAL, 990.0, "the attempt's 1000 s", True),
        (Stage.EVAL, 2000.0, "the attempt's 1000 s", True),
    ],
)
async def test_the_nearest_limit_holds(stage: Stage, held_before: float, limit: str, of_attempt: bool) -> None:
    deadline = stage_deadline(TimeoutSettings(attempt=1000), stage, held_before=held_before)
    assert (deadline.limit, deadline.of_attempt) == (limit, of_attempt)


async def test_without_a_limit_on_the_attempt_only_the_stages_count() -> None:
    assert not stage_deadline(TimeoutSettings(), Stage.EVAL, held_before=1e6).of_attempt


async def test_what_strikes_is_named() -> None:
    assert str(Deadline.after(0, "INIT's 5 s").error("the sandbox started")) == "INIT's 5 s ran out while the sandbox started"
    assert isinstance(Deadline.after(0, "INIT's 5 s").error(), StageTimedOut)
    failure = classify(Deadline.after(0, "the attempt's 5 s", of_attempt=True).error(), Phase.RUN)
    assert failure.termination.cause is Cause.ATTEMPT_TIMEOUT
    assert failure.termination.blame is Blame.INFRASTRUCTURE
    assert final_state(failure.termination) is State.TIMED_OUT


@pytest.fixture
async def conversation() -> AsyncIterator[Conversation]:
    client = ModelClient()
    async with ScriptedServer() as server:
        address = ServerAddress(server.url, server.model, "policy", 0, 8192)
        yield Conversation(client, FixedRoute(address), Sampling(max_tokens=400), call_timeout=30.0)
        await client.close()


def context(conversation: Conversation) -> RunContext:
    return RunContext(EnvironmentConfig(), TaskPayload(), None, conversation, Recording())


async def test_an_agent_robbed_of_its_time_by_earlier_stages_is_not_to_blame(conversation: Conversation) -> None:
    async def hang(ctx: Any) -> Any:
        await asyncio.Event().wait()

    deadline = Deadline.after(0.02, "the attempt's 5 s", of_attempt=True)
    with pytest.raises(AttemptTimedOut, match="the attempt's 5 s ran out"):
        await run_stage(Scenario(hang), context(conversation), deadline=deadline)


class Slow:
    """A tool that says which time limit it was given."""

    name = "slow"
    description = "Take one's time."
    arguments = ToolArguments
    code_argument = None

    async def call(self, arguments: ToolArguments, *, timeout: float) -> ToolResult:
        return ToolResult(f"limit {timeout:g}")


CALL_SLOW = '<tool_call>{"name": "slow", "arguments": {}}</tool_call>'
CALL_BUDGET = '<tool_call>{"name": "budget", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(("of_run", "of_environment", "expected"), [(2.0, 30.0, 2), (60.0, 30.0, 30), (None, 30.0, 30)])
async def test_a_tool_call_gets_the_shorter_limit(
    conversation: Conversation, of_run: float | None, of_environment: float, expected: int
) -> None:
    async def run(ctx: RunContext) -> Any:
        settings = AgentSettings(tool_timeout=of_environment)
        agent = Agent(ctx.conversation, [Slow()], settings, ctx.recorder, ctx.budget)
        return await agent.run([{"role": "user", "content": f"[[reply:{CALL_SLOW}]][[reply2:Done.]]"}])

    ctx = context(conversation)
    await run_stage(Scenario(run), ctx, deadline=Deadline.after(30, "30 s"), action_timeout=of_run)

    assert isinstance(ctx.recorder, Recording)
    assert ctx.recorder.turns[0].tool_calls[0].output == f"limit {expected}"


async def test_the_agent_sees_what_is_left(conversation: Conversation) -> None:
    async def run(ctx: RunContext) -> Any:
        agent = Agent(ctx.conversation, [BudgetTool(ctx.budget)], AgentSettings(max_turns=5), ctx.recorder, ctx.budget)
        return await agent.run([{"role": "user", "content": f"[[reply:{CALL_BUDGET}]][[reply2:Done.]]"}])

    ctx = context(conversation)
    await run_stage(Scenario(run), ctx, deadline=Deadline.after(3600, "an hour"))

    assert isinstance(ctx.recorder, Recording)
    first = ctx.recorder.turns[0]
    told = json.loads(first.tool_calls[0].output)
    assert first.model_call is not None
    used = first.model_call.prompt_tokens + len(first.model_call.sampled_ids)
    assert (told["turns"], told["context_tokens"]) == (4, 8192 - used)
    assert 3000 < told["seconds"] <= 3600


async def test_the_deadline_variable_is_a_moment(conversation: Conversation) -> None:
    before = time.time()
    variables = Budget(Deadline.after(100, "100 s"), conversation).variables()
    assert set(variables) == {"PRORL_DEADLINE"}
    assert before + 99 <= int(variables["PRORL_DEADLINE"]) <= time.time() + 100
