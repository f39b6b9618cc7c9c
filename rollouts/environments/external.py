"""Tasks of agents that live elsewhere: a session without a task of its own has one of these. Its reward comes from outside."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from rollouts.engine.errors import EnvironmentFailed, EvaluationFailed
from rollouts.environments.base import EnvironmentConfig, EvalContext, InitContext, RunContext, Score, TaskPayload
from rollouts.lifecycle import Termination
from sandboxes.protocol import SandboxSpec

EXTERNAL = "external"


class ExternalTask(TaskPayload):
    """Whatever the agent's side wants to find again."""

    metadata: dict[str, Any] = Field(default_factory=dict)


class External:
    """Carried out and scored outside; only sessions can use it."""

    config: ClassVar = EnvironmentConfig
    task: ClassVar = ExternalTask
    evaluates_in_sandbox: ClassVar = False

    def check_task(self, task: ExternalTask) -> None:
        """Nothing here scores it, so anything is fine."""

    def sandbox_spec(self, config: EnvironmentConfig, task: ExternalTask) -> SandboxSpec | None:
        return None

    async def initialize(self, ctx: InitContext) -> None:
        """Nothing to prepare."""

    async def run(self, ctx: RunContext) -> Termination:
        raise EnvironmentFailed("its agent lives elsewhere: open a session instead of submitting a group")

    async def evaluate(self, ctx: EvalContext) -> Score:
        raise EvaluationFailed("its reward comes from outside, with the session")
