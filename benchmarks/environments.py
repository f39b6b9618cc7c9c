"""Environments that only benchmarks use; see plugin/."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from pydantic import Field

from rollouts.environments.base import (
    EnvironmentConfig,
    EvalContext,
    InitContext,
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


class Staged:
    """Stages that only take their time: no sandbox, no model, no CPU."""

    config: ClassVar = EnvironmentConfig
    task: ClassVar = StagedTask
    evaluates_in_sandbox: ClassVar = False

    def check_task(self, task: StagedTask) -> None:
        """Every task can be scored."""

    def sandbox_spec(self, config: Any, task: StagedTask) -> None:
        return None

    async def initialize(self, ctx: InitContext) -> None:
        await asyncio.sleep(ctx.task.init)

    async def run(self, ctx: RunContext) -> Termination:
        await asyncio.sleep(ctx.task.run)
        return Termination(Phase.RUN, Cause.COMPLETED)

    async def evaluate(self, ctx: EvalContext) -> Score:
        await asyncio.sleep(ctx.task.eval)
        return Score([RewardComponent("done", 1.0)])
