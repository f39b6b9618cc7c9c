"""An environment for tests: the agent writes a note in its sandbox, and a judge that can be away or slow scores it there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.budget import BudgetTool
from rollouts.engine.errors import EvaluationFailed
from rollouts.engine.tools import BashTool, Tool, describe_tools
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
from rollouts.lifecycle import Termination
from sandboxes.errors import SandboxFileError
from sandboxes.protocol import Limits, SandboxSpec, Session

NOTE = "note.txt"


class NotesConfig(EnvironmentConfig):
    judge: str  # a directory: its file `here` makes the judge answer, its file `slow` keeps it from answering yet
    limits: dict[str, int] = {}  # of `sandboxes.protocol.Limits`, where they differ


class NotesTask(TaskPayload):
    question: str
    init_seconds: float = 0.0


class BareNotes(PlainEnvironment):
    """A note with the agent's deadline in it is worth 1."""

    config: ClassVar = NotesConfig
    task: ClassVar = NotesTask
    evaluates_in_sandbox: ClassVar = True

    def sandbox_spec(self, config: NotesConfig, task: NotesTask) -> SandboxSpec:
        return SandboxSpec(limits=Limits(**config.limits))

    async def initialize(self, ctx: InitContext) -> None:
        await asyncio.sleep(ctx.task.init_seconds)

    async def run(self, ctx: RunContext) -> Termination:
        assert ctx.sandbox is not None
        tools: list[Tool] = [BashTool(ctx.sandbox), BudgetTool(ctx.budget)]
        agent = Agent(ctx.conversation, tools, AgentSettings(), ctx.recorder, ctx.budget)
        try:
            return await agent.run(
                [{"role": "system", "content": describe_tools(tools)}, {"role": "user", "content": ctx.task.question}]
            )
        finally:
            ctx.artefacts["note"] = await _read(ctx.sandbox)

    async def evaluate(self, ctx: EvalContext) -> Score:
        assert ctx.sandbox is not None
        judge = Path(ctx.config.judge)
        if not (judge / "here").exists():
            raise EvaluationFailed("the judge is away")
        while (judge / "slow").exists():
            await asyncio.sleep(0.05)
        note = await _read(ctx.sandbox)
        return Score([RewardComponent("dated", float(note.strip().isdecimal()), detail={"note": note})])


class Notes(BareNotes):
    """Its sandbox can be rebuilt."""

    async def restore(self, ctx: EvalContext) -> None:
        assert ctx.sandbox is not None
        await ctx.sandbox.write_file(NOTE, ctx.artefacts.get("note", "").encode())


async def _read(sandbox: Session) -> str:
    try:
        return (await sandbox.read_file(NOTE)).decode()
    except SandboxFileError:
        return ""
