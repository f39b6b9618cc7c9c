"""An environment for tests: the agent is shown a picture and draws with Python."""

from __future__ import annotations

from typing import Any, ClassVar

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.tools import PythonTool
from rollouts.environments.base import EvalContext, PlainEnvironment, RewardComponent, RunContext, Score, TaskPayload
from rollouts.environments.pictures import TaskPicture, picture_message
from rollouts.lifecycle import Termination
from sandboxes.protocol import SandboxSpec


class DrawingTask(TaskPayload):
    question: str
    model: TaskPicture


class Drawing(PlainEnvironment):
    """Every drawing is worth 1."""

    task: ClassVar = DrawingTask

    def sandbox_spec(self, config: Any, task: DrawingTask) -> SandboxSpec:
        return SandboxSpec()

    async def run(self, ctx: RunContext) -> Termination:
        assert ctx.sandbox is not None
        agent = Agent(ctx.conversation, [PythonTool(ctx.sandbox)], AgentSettings(), ctx.recorder, ctx.budget)
        return await agent.run([picture_message(ctx.task.question, ctx.task.model)])

    async def evaluate(self, ctx: EvalContext) -> Score:
        return Score([RewardComponent("drawn", 1.0)])
