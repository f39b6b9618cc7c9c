"""Sums of two numbers in one turn: small enough for the smallest model to learn on a CPU. No sandbox, no tools."""

from __future__ import annotations

import random
import re
from typing import Any, ClassVar

from pydantic import Field

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.environments.base import (
    ANSWER,
    EnvironmentConfig,
    EvalContext,
    PlainEnvironment,
    RewardComponent,
    RunContext,
    Score,
    TaskPayload,
)
from rollouts.lifecycle import Termination

_INTEGER = re.compile(r"-?[0-9]+")


class ArithmeticConfig(EnvironmentConfig):
    """Settings of the arithmetic environment."""

    prompt: str = Field(
        "Please solve {a} + {b}. Just give the answer.",
        max_length=1000,
        pattern=r"\{a\}(.|\n)*\{b\}",
        description="The question; {a} and {b} stand for the numbers.",
    )


class ArithmeticTask(TaskPayload):
    """Two numbers to add."""

    a: int = Field(ge=0, le=10**9)
    b: int = Field(ge=0, le=10**9)


class Arithmetic(PlainEnvironment):
    """`a + b`, rewarded with 1 or 0."""

    config: ClassVar = ArithmeticConfig
    task: ClassVar = ArithmeticTask

    async def run(self, ctx: RunContext) -> Termination:
        question = ctx.config.prompt.replace("{a}", str(ctx.task.a)).replace("{b}", str(ctx.task.b))
        agent = Agent(ctx.conversation, [], AgentSettings(max_turns=1), ctx.recorder, ctx.budget)
        try:
            return await agent.run([{"role": "user", "content": question}])
        finally:
            ctx.artefacts[ANSWER] = agent.final_text

    async def evaluate(self, ctx: EvalContext) -> Score:
        correct = last_integer(ctx.artefacts[ANSWER]) == ctx.task.a + ctx.task.b
        return Score([RewardComponent("correct", float(correct))])

    def gold_answer(self, task: ArithmeticTask) -> str:
        return str(task.a + task.b)


def last_integer(text: str) -> int | None:
    """The last integer of a reply, or None.

    The last one, because small models repeat the question before they answer ("2 + 3 = 5"), and because a reply that lists
    guesses then has to settle on one.
    """
    digits = _INTEGER.findall(text)
    return int(digits[-1]) if digits and len(digits[-1]) <= 20 else None


def generate(*, seed: int, count: int, max_value: int) -> list[dict[str, Any]]:
    """Task payloads with numbers from 1 to `max_value`, the same for the same seed; no pair twice while there are others."""
    pairs = [(a, b) for a in range(1, max_value + 1) for b in range(1, max_value + 1)]
    random.Random(seed).shuffle(pairs)  # noqa: S311 - not for secrets
    return [{"a": a, "b": b} for a, b in (pairs[i % len(pairs)] for i in range(count))]
