"""Environments that only benchmarks use; see plugin/."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from pydantic import Field

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.tools import ToolArguments, ToolResult
from rollouts.environments.base import (
    ANSWER,
    EvalContext,
    InitContext,
    PlainEnvironment,
    RewardComponent,
    RunContext,
    Score,
    TaskPayload,
)
from rollouts.lifecycle import Cause, Phase, Termination


class StagedTask(TaskPayload):
    """How long each stage takes, in seconds."""

    init: float = Field(ge=0)
    run: float = Field(ge=0)
    eval: float = Field(ge=0)


class Staged(PlainEnvironment):
    """Stages that only take their time: no sandbox, no model, no CPU."""

    task: ClassVar = StagedTask

    async def initialize(self, ctx: InitContext) -> None:
        await asyncio.sleep(ctx.task.init)

    async def run(self, ctx: RunContext) -> Termination:
        await asyncio.sleep(ctx.task.run)
        return Termination(Phase.RUN, Cause.COMPLETED)

    async def evaluate(self, ctx: EvalContext) -> Score:
        await asyncio.sleep(ctx.task.eval)
        return Score([RewardComponent("done", 1.0)])


class NoteArguments(ToolArguments):
    text: str


class NoteTool:
    """A tool that answers at once."""

    name = "note"
    description = "Keep a note."
    arguments = NoteArguments
    code_argument = None

    async def call(self, arguments: NoteArguments, *, timeout: float) -> ToolResult:
        return ToolResult("Noted.")


class QuestionTask(TaskPayload):
    """What the model is asked."""

    question: str


class Turns(PlainEnvironment):
    """A conversation of as many turns as the model likes, without a sandbox; an answer is right."""

    task: ClassVar = QuestionTask

    async def run(self, ctx: RunContext) -> Termination:
        agent = Agent(ctx.conversation, [NoteTool()], AgentSettings(max_turns=20), ctx.recorder)
        try:
            return await agent.run([{"role": "user", "content": ctx.task.question}])
        finally:
            ctx.artefacts[ANSWER] = agent.final_text

    async def evaluate(self, ctx: EvalContext) -> Score:
        return Score([RewardComponent("answered", float(bool(ctx.artefacts[ANSWER])))])
