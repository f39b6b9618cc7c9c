"""What a run may set. Stored complete on the run, so that a later change of a default changes no old run. No Django."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from rollouts.lifecycle import Blame, Cause, Fidelity, OnAgentTimeout, OnBudget, Phase, Termination
from rollouts.llm.types import Sampling


class SamplingSettings(BaseModel):
    """How replies are sampled. `max_tokens` bounds one turn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(1.0, ge=0, le=5)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, description="-1 considers all tokens.")
    max_tokens: int = Field(512, ge=1)
    stop: tuple[str, ...] = Field((), max_length=8)

    def to_sampling(self) -> Sampling:
        return Sampling(**self.model_dump())


class TimeoutSettings(BaseModel):
    """Budgets in seconds. Waiting for a worker counts against none of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    init: float = Field(120, gt=0, le=86_400, description="The INIT stage.")
    agent: float = Field(600, gt=0, le=86_400, description="The agent's own budget; starts with RUN.")
    eval: float = Field(120, gt=0, le=86_400, description="The EVAL stage.")
    model_call: float = Field(300, gt=0, le=86_400, description="One model call, retries included.")
    action: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="One tool call; null leaves it to the environment, whose limit holds too.",
    )
    attempt: float | None = Field(
        None, gt=0, le=604_800, description="All stages of an attempt together; null leaves it to the stages. At least `agent`."
    )

    @field_validator("attempt")
    @classmethod
    def _has_room_for_the_agent(cls, attempt: float | None, info: ValidationInfo) -> float | None:
        agent = info.data.get("agent", 0)
        if attempt is not None and attempt < agent:
            raise ValueError(f"{attempt:g} s is less than the agent's {agent:g} s; raise it, or lower `agent`")
        return attempt


class RetrySettings(BaseModel):
    """Which failures of the infrastructure are repeated, and how often. `max_infra_retries` bounds all of it together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    init: int | None = Field(None, ge=0, le=100, description="Repeats after failures of INIT; null: no bound of its own.")
    run: int | None = Field(None, ge=0, le=100, description="Repeats after failures of RUN; null: no bound of its own.")
    eval: int | None = Field(None, ge=0, le=100, description="Repeats after failures of EVAL; null: no bound of its own.")
    never: tuple[Cause, ...] = Field((), description="Causes that end the rollout at once.")
    always: tuple[Cause, ...] = Field(
        (), description="Causes that are repeated also when the failure looks permanent, such as an environment's defect."
    )

    @field_validator("never", "always")
    @classmethod
    def _can_be_repeated(cls, causes: tuple[Cause, ...], info: ValidationInfo) -> tuple[Cause, ...]:
        for cause in causes:
            if Termination(Phase.RUN, cause).blame is not Blame.INFRASTRUCTURE:
                raise ValueError(f"{cause.value} is no failure of the infrastructure and never repeated; leave it out")
        if both := set(causes) & set(info.data.get("never", ())):
            raise ValueError(f"{min(both).value} stands in `never` as well; leave it in one of them")
        return causes


class Versions(enum.StrEnum):
    """From which versions of its policy a rollout may be sampled (a setting of the run)."""

    MIXED = "mixed"  # new weights are used from the next turn, or from the next token
    GROUP = "group"  # all rollouts of a group from the one that the first of them started on
    STRICT = "strict"  # each rollout from the one it started on


class RunSettings(BaseModel):
    """Settings of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sampling: SamplingSettings = SamplingSettings.model_validate({})
    timeouts: TimeoutSettings = TimeoutSettings.model_validate({})
    on_agent_timeout: OnAgentTimeout = OnAgentTimeout.SCORE
    on_budget: OnBudget = Field(OnBudget.FINISH, description="Rollouts in flight when a budget runs out.")
    versions: Versions = Field(
        Versions.MIXED,
        description="Which policy versions one rollout (`strict`) or one group (`group`) may be sampled from: only the one it "
        "started on. What new weights overtake is begun anew. `mixed`: any.",
    )
    retries: RetrySettings = RetrySettings.model_validate({})
    max_infra_retries: int = Field(
        5, ge=0, le=100, description="Attempts repeated for the infrastructure's fault before giving up."
    )

    def lets_into_batch(self, cause: Cause, reward: float | None, fidelity: str) -> bool:
        """Whether a rollout whose RUN ended by `cause` and that was scored with `reward` is trainable.

        Never without the sampled ids (`fidelity` is its badge): there is nothing to train on.
        """
        if fidelity == Fidelity.TEXT_ONLY:
            return False
        masked = cause is Cause.AGENT_TIMEOUT and self.on_agent_timeout is not OnAgentTimeout.SCORE
        return Termination(Phase.RUN, cause).blame is Blame.POLICY and not masked and reward is not None


Maximum = Annotated[int | None, Field(ge=1, le=2**63 - 1)]


class LimitSettings(BaseModel):
    """Limits of a run or a project; null for none. See `rollouts.models.limits`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_in_flight: Maximum = Field(None, description="Rollouts started and not finished at once.")
    max_queued: Maximum = Field(None, description="Rollouts accepted and not finished at once.")
    max_rollouts: Maximum = Field(None, description="Rollouts accepted in all.")
    max_tokens: Maximum = Field(None, description="Prompt and sampled tokens of all attempts.")
    max_sandbox_seconds: Maximum = Field(None, description="Seconds of INIT, RUN and EVAL of all attempts with a sandbox.")
    max_wall_seconds: Maximum = Field(None, description="Seconds since it was created.")
