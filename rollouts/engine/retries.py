"""What is done about a failed stage: repeat it, or give the rollout up. One pure function, so that a table can test it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollouts.engine.errors import Failure
from rollouts.lifecycle import Blame, Cause, Stage
from rollouts.run_settings import RunSettings

# A repeat waits about this long, doubling with every one before it, so that a sick node or server is not hammered.
_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 60.0


@dataclass(frozen=True)
class Retry:
    """Repeat it after a pause: only EVAL in the same attempt, or (not `only_eval`) the whole rollout in a new one."""

    after_seconds: float
    only_eval: bool


@dataclass(frozen=True)
class GiveUp:
    """The rollout ends. `reason` is one clause for people."""

    reason: str


def decide(
    settings: RunSettings, stage: Stage, failure: Failure, retries: Mapping[Stage, int], *, restores: bool = False
) -> Retry | GiveUp:
    """`retries` is how often each stage of this rollout was repeated before, over all its attempts.

    `restores`: the environment can rebuild a lost sandbox from the artefacts of RUN.
    """
    if reason := _why_not(settings, stage, failure, retries):
        return GiveUp(reason)
    backoff = min(_FIRST_BACKOFF_SECONDS * 2 ** sum(retries.values()), _LONGEST_BACKOFF_SECONDS)
    return Retry(backoff, only_eval=_leaves_run_intact(stage, failure.termination.cause, restores))


def _why_not(settings: RunSettings, stage: Stage, failure: Failure, retries: Mapping[Stage, int]) -> str:
    """Why it is not repeated; empty when it is."""
    cause = failure.termination.cause
    if failure.termination.blame is not Blame.INFRASTRUCTURE:
        return "it is not the infrastructure's failure"
    if cause in settings.retries.never:
        return f"settings.retries.never names {cause.value}"
    if not failure.retryable and cause not in settings.retries.always:
        return "it would fail again"
    if stage is Stage.EVAL and cause is Cause.ATTEMPT_TIMEOUT:
        return "the attempt has no time left"
    bound = {Stage.INIT: settings.retries.init, Stage.RUN: settings.retries.run, Stage.EVAL: settings.retries.eval}[stage]
    if bound is not None and retries.get(stage, 0) >= bound:
        return f"settings.retries.{stage.value} allows {bound}"
    if sum(retries.values()) >= settings.max_infra_retries:
        return f"settings.max_infra_retries allows {settings.max_infra_retries}"
    return ""


def _leaves_run_intact(stage: Stage, cause: Cause, restores: bool) -> bool:
    """RUN's artefacts are stored, so only a sandbox that scoring needed and nobody can rebuild makes RUN worth repeating."""
    return stage is Stage.EVAL and (cause is not Cause.SANDBOX_ERROR or restores)
