"""Tasks of agents that live elsewhere: a session without a task of its own has one of these. Its reward comes from outside."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from rollouts.engine.errors import EnvironmentFailed, EvaluationFailed
from rollouts.environments.base import EvalContext, PlainEnvironment, RunContext, Score, TaskPayload
from rollouts.lifecycle import Termination

EXTERNAL = "external"


class ExternalTask(TaskPayload):
    """Whatever the agent's side wants to find again."""

    metadata: dict[str, Any] = Field(default_factory=dict)


class External(PlainEnvironment):
    """Carried out and scored outside; only sessions can use it."""

    task: ClassVar = ExternalTask

    async def run(self, ctx: RunContext) -> Termination:
        raise EnvironmentFailed("its agent lives elsewhere: open a session instead of submitting a group")

    async def evaluate(self, ctx: EvalContext) -> Score:
        raise EvaluationFailed("its reward comes from outside, with the session")
