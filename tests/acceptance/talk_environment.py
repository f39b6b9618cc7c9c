"""An environment for tests with any model: somebody who goes on talking, whatever is answered."""

from __future__ import annotations

from typing import ClassVar

from rollouts.engine.turn import TurnDraft
from rollouts.environments.base import (
    EnvironmentConfig,
    EvalContext,
    PlainEnvironment,
    RewardComponent,
    RunContext,
    Score,
    TaskPayload,
)
from rollouts.environments.pictures import TaskPicture, picture_message
from rollouts.lifecycle import Cause, Phase, Termination


class TalkConfig(EnvironmentConfig):
    turns: int = 3


class TalkTask(TaskPayload):
    pictures: list[TaskPicture] = []  # one is shown in each turn, as long as there are any


class Talk(PlainEnvironment):
    """Every talk is worth 1."""

    config: ClassVar = TalkConfig
    task: ClassVar = TalkTask

    async def run(self, ctx: RunContext) -> Termination:
        for turn in range(ctx.config.turns):
            said = picture_message(f"Go on, for the {turn + 1}. time.", *ctx.task.pictures[turn : turn + 1])
            ctx.conversation.append(said)
            draft = TurnDraft(turn, first_message=2 * turn)
            draft.add_message(said)
            draft.model_call = await ctx.conversation.sample(turn)
            draft.add_message({"role": "assistant", "content": draft.model_call.text})
            record = draft.record()
            assert record is not None
            await ctx.recorder.turn(record)
        return Termination(Phase.RUN, Cause.COMPLETED)

    async def evaluate(self, ctx: EvalContext) -> Score:
        return Score([RewardComponent("talked", 1.0)])
