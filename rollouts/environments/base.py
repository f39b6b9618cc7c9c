"""The environment protocol: what an environment author writes. No Django.

An environment is a handler class plus a validated configuration. The handler is found by the entry point group
`prorl.environments`; a row in the admin names it and carries the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from sandboxes.protocol import SandboxSpec, Session

if TYPE_CHECKING:
    from rollouts.engine.budget import Budget
    from rollouts.engine.records import Recorder
    from rollouts.lifecycle import Fidelity, Termination
    from rollouts.llm.conversation import Conversation
    from rollouts.llm.errors import ModelError

# The artefact that holds the agent's final text, in every environment whose answer is text.
ANSWER = "answer"


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


class ModelAccess(Protocol):
    """A model URL inside the sandbox, for a program that knows nothing of us. Its calls are sampled and stored like our own.

    `url` has no path: OpenAI's clients want "/v1" behind it, Anthropic's and Google's add their own. `key` is a secret:
    programs get it by their environment, never by their arguments. `model` is what to call the model.
    """

    url: str
    key: str
    model: str

    @property
    def calls(self) -> int:
        """How many were answered so far."""
        ...

    @property
    def overflowed(self) -> bool:
        """Whether a call was refused because its prompt left no room in the model's context."""
        ...

    @property
    def failure(self) -> ModelError | None:
        """Why the last call was not answered, when that was the servers' fault."""
        ...

    async def until_over(self) -> Termination:
        """Wait until no more calls are answered because the agent has had all of its turns, and return what that means.

        Raises `StoreFailed` or `AttemptSuperseded` as soon as a call cannot be stored, and `Overtaken` when the agent asks
        again although there will be no server for it any more.
        """
        ...


class AgentGateway(Protocol):
    """Gives the agent of one rollout a model URL. Use once; the shipped loop's `conversation` is then left alone."""

    @property
    def fidelity(self) -> Fidelity | None:
        """The badge of what was sampled through it, None as long as it was not used."""
        ...

    def open(self, sandbox: Session, *, max_calls: int) -> AbstractAsyncContextManager[ModelAccess]:
        """For as long as the context is open; leaving it ends the calls that are under way."""
        ...


@dataclass
class RunContext(InitContext):
    """What `run` gets.

    The shipped loop is `Agent(ctx.conversation, tools, AgentSettings(...), ctx.recorder, ctx.budget)`. `artefacts` is what
    evaluation will see: JSON values, kept as they are when the agent's time runs out in the middle, so fill it in a `finally`.
    `budget` is what the agent may still use; commands in the sandbox find its end in `PRORL_DEADLINE`. An agent that is
    a program in the sandbox gets its model from `gateway` instead of `conversation`.
    """

    conversation: Conversation
    recorder: Recorder
    gateway: AgentGateway | None = None
    artefacts: dict[str, Any] = field(default_factory=dict)
    budget: Budget = field(init=False)


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

    async def run(self, ctx: RunContext) -> Termination:
        """Carry out the rollout and return how it ended; normally `return await agent.run(messages)`."""
        ...

    async def evaluate(self, ctx: EvalContext) -> Score:
        """Score from the artefacts (and the sandbox, if asked for).

        Raise when the artefacts cannot be judged (`EvaluationFailed(..., retryable=True)` for what may pass); never score that.
        """
        ...


class PlainEnvironment:
    """What an environment need not say: without settings, for any task, without a sandbox. Override what does not fit."""

    config: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    task: ClassVar[type[TaskPayload]] = TaskPayload
    evaluates_in_sandbox: ClassVar[bool] = False

    def check_task(self, task: Any) -> None:
        """Every task can be scored."""

    def sandbox_spec(self, config: Any, task: Any) -> SandboxSpec | None:
        return None

    async def initialize(self, ctx: InitContext) -> None:
        """There is nothing to prepare."""


@runtime_checkable
class KnowsGoldAnswer(Protocol):
    """An environment that can solve its own tasks, which lets the conformance kit check its scoring."""

    def gold_answer(self, task: Any) -> str:
        """A final text of an agent that deserves the full reward."""
        ...


@runtime_checkable
class KnowsGoldArtefacts(Protocol):
    """An environment that knows what a good agent leaves, of some of its tasks, where that is more than a text."""

    def gold_artefacts(self, task: Any) -> Mapping[str, Any] | None:
        """Artefacts that deserve the full reward, in a sandbox that `restore` has brought to what they say."""
        ...


@runtime_checkable
class RestoresSandbox(Protocol):
    """An environment that evaluates in the sandbox and can rebuild what RUN left there, so that rollouts can be rescored."""

    async def restore(self, ctx: EvalContext) -> None:
        """Bring `ctx.sandbox`, fresh from `initialize`, to where `evaluate` finds it after RUN, from `ctx.artefacts` alone."""
        ...
