"""What a run may set. Stored complete on the run, so that a later change of a default changes no old run. No Django."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rollouts.lifecycle import OnAgentTimeout
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


class RunSettings(BaseModel):
    """Settings of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sampling: SamplingSettings = SamplingSettings.model_validate({})
    timeouts: TimeoutSettings = TimeoutSettings.model_validate({})
    on_agent_timeout: OnAgentTimeout = OnAgentTimeout.SCORE
    max_infra_retries: int = Field(
        5, ge=0, le=100, description="Attempts repeated for the infrastructure's fault before giving up."
    )
