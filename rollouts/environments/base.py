"""The environment protocol: what an environment author writes. No Django.

An environment is a handler class plus a validated configuration. The handler is found by the entry point group
`prorl.environments`; a row in the admin names it and carries the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from sandboxes.protocol import SandboxSpec, Session

if TYPE_CHECKING:
    from rollouts.engine.agent import Agent


@dataclass(frozen=True)
class RewardComponent:
    """A named part of a reward. `value` is null when it could not be measured; the total is then null as well."""

    name: str
    value: float | None
    weight: float = 1.0
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """The result of an evaluation. The total reward is the weighted sum of the components."""

    components: list[RewardComponent]

    @property
    def total(self) -> float | None:
        """Null when any component is null."""
        values = [c.value for c in self.components]
        if any(v is None for v in values):
            return None
        return sum(c.weight * v for c, v in zip(self.components, values, strict=True) if v is not None)


class EnvironmentConfig(BaseModel):
    """Settings that every environment has; handlers subclass it. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskPayload(BaseModel):
    """The shape of one task; handlers subclass it. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class InitContext:
    """What `initialize` gets: the sandbox is up when the handler's `sandbox_spec` asked for one."""

    config: Any
    task: Any
    sandbox: Session | None


@dataclass
class RunContext(InitContext):
    """What `run` gets. `agent` is the shipped loop, ready to go; `artefacts` is what evaluation will see."""

    agent: Agent
    artefacts: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvalContext:
    """What `evaluate` gets. `sandbox` is None unless the handler sets `evaluates_in_sandbox`."""

    config: Any
    task: Any
    artefacts: Mapping[str, Any]
    sandbox: Session | None


class Environment(Protocol):
    """One kind of task.

    Instances are made once per process and shared by all rollouts: keep state in the contexts.
    Any exception that leaves a method is the environment's failure (infrastructure; reward null), never a score.
    """

    config: ClassVar[type[EnvironmentConfig]]
    task: ClassVar[type[TaskPayload]]
    evaluates_in_sandbox: ClassVar[bool]

    def check_task(self, task: Any) -> None:
        """Raise ValueError when the task cannot be scored (for instance a gold answer that does not parse)."""
        ...

    def sandbox_spec(self, config: Any, task: Any) -> SandboxSpec | None:
        """The sandbox this task needs, or None."""
        ...

    async def initialize(self, ctx: InitContext) -> None:
        """Prepare the sandbox."""
        ...

    async def run(self, ctx: RunContext) -> Any:
        """Carry out the rollout and return its `Termination`; normally `return await ctx.agent.run(messages, tools)`."""
        ...

    async def evaluate(self, ctx: EvalContext) -> Score:
        """Score from the artefacts (and the sandbox, if asked for)."""
        ...
