"""A rollout and its sandbox: what becomes of the one when the other ends. Real sandboxes, and a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.deadlines import Deadline
from rollouts.engine.records import RunOutcome, TurnRecord
from rollouts.engine.stages import run_stage
from rollouts.engine.tools import BashTool
from rollouts.environments.base import EnvironmentConfig, EvalContext, PlainEnvironment, RunContext, Score, TaskPayload
from rollouts.lifecycle import Cause, Termination
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import Sampling, ServerAddress
from sandboxes.errors import LimitExceeded, SandboxLost
from sandboxes.protocol import Backend, Limits, SandboxSpec
from sandboxes.registry import get_backend


class Shell(PlainEnvironment):
    """The agent has a shell; what it leaves in `answer` is the artefact."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def sandbox_spec(self, config: Any, task: Any) -> SandboxSpec:
        return SandboxSpec()

    async def run(self, ctx: RunContext) -> Termination:
        assert ctx.sandbox is not None
        agent = Agent(ctx.conversation, [BashTool(ctx.sandbox)], AgentSettings(), ctx.recorder, ctx.budget)
        try:
            return await agent.run([{"role": "user", "content": self._prompt}])
        finally:
            ctx.artefacts["answer"] = (await ctx.sandbox.read_file("answer")).decode()

    async def evaluate(self, ctx: EvalContext) -> Score:
        raise NotImplementedError


class Recording:
    """A store in memory."""

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []

    async def turn(self, record: TurnRecord) -> None:
        self.turns.append(record)


class Stage:
    """One sandbox, one model server, one rollout."""

    name = "rollout"

    def __init__(self, backend: Backend, server: ScriptedServer, client: ModelClient) -> None:
        self.backend, self.server, self._client = backend, server, client
        self.recording = Recording()

    async def play(self, prompt: str) -> RunOutcome:
        """Start a sandbox unless there is one, and carry out RUN in it."""
        if self.name not in await self.backend.list():
            await self.backend.start(self.name, SandboxSpec())
        session = await self.backend.connect(self.name)
        try:
            address = ServerAddress(self.server.url, self.server.model, "policy", 0, 8192)
            conversation = Conversation(self._client, FixedRoute(address), Sampling(max_tokens=400), call_timeout=60.0)
            ctx = RunContext(EnvironmentConfig(), TaskPayload(), session, conversation, self.recording)
            return await run_stage(Shell(prompt), ctx, deadline=Deadline.after(60, "the test's 60 s"))
        finally:
            await session.close()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    backend, client = get_backend("bubblewrap", tmp_path), ModelClient()
    async with ScriptedServer() as server:
        yield Stage(backend, server, client)
        await client.close()
    await backend.stop(Stage.name)


def bash(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_rollout_ends_while_its_sandbox_goes_on(stage: Stage) -> None:
    outcome = await stage.play(f"[[reply:{bash('echo 4 > ~/answer')}]][[reply2:done]]")

    assert outcome.artefacts == {"answer": "4\n"}


async def test_losing_the_sandbox_ends_a_model_call_at_once(stage: Stage) -> None:
    rollout = asyncio.create_task(stage.play("[[delay:60]]"))
    await until(lambda: stage.server.running == 1)
    await stage.backend.stop(stage.name)
    with pytest.raises(SandboxLost):
        await rollout

    await until(lambda: stage.server.aborted == 1)  # the server generates for nobody
    [turn] = stage.recording.turns
    assert turn.model_call is None and [m.role for m in turn.messages] == ["user"]


async def test_losing_the_sandbox_ends_a_tool_call_at_once(stage: Stage) -> None:
    rollout = asyncio.create_task(stage.play(f"[[reply:{bash('sleep 60')}]]"))
    await until(lambda: stage.server.finished == 1)
    await stage.backend.stop(stage.name)
    with pytest.raises(SandboxLost):
        await rollout

    [turn] = stage.recording.turns
    assert turn.model_call is not None


async def test_a_sandbox_ended_for_its_limit_ends_the_rollout_as_the_policys_doing(stage: Stage) -> None:
    await stage.backend.start(stage.name, SandboxSpec(limits=Limits(wall_seconds=2)))
    outcome = await stage.play("[[delay:60]]")

    assert outcome.termination.cause is Cause.SANDBOX_LIMIT
    assert outcome.termination.detail.startswith("wall_seconds: ")
    await until(lambda: stage.server.aborted == 1)


async def test_a_sandbox_ended_before_the_agent_began_is_not_its_doing(stage: Stage) -> None:
    await stage.backend.start(stage.name, SandboxSpec(limits=Limits(wall_seconds=0.2)))
    session = await stage.backend.connect(stage.name)
    with pytest.raises(LimitExceeded):
        await session.until_lost()
    await session.close()
    with pytest.raises(SandboxLost, match="before the agent began"):
        await stage.play("[[reply:never asked]]")
