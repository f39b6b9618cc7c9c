"""Rollouts that must be sampled from a policy version that nobody serves any more: they end, rather than wait for ever."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db import connection

from rollouts.engine.errors import Failure
from rollouts.lifecycle import Cause, Phase, Stage, State, Termination
from rollouts.models import LLMServer, Policy, Rollout
from rollouts.run_settings import RunSettings, Versions

from .errors import FieldError
from .finish import give_up_attempt
from .policies import newest_announced
from .transition import Guard

# A group of which no rollout has been sampled to its end yet begins anew as a whole, with the newest version.
_FREE_GROUPS = """
UPDATE rollouts_group g SET policy_version = NULL FROM rollouts_run run JOIN rollouts_policy p ON p.id = run.policy_id
WHERE g.run_id = run.id AND run.settings ->> 'versions' = %(group)s AND (%(policy)s::uuid IS NULL OR p.id = %(policy)s)
  AND run.finished_rollouts < run.used_rollouts AND g.policy_version < p.version AND {gone}
  AND EXISTS (SELECT FROM rollouts_rollout r WHERE r.group_id = g.id AND r.state IN ('queued', 'ready'))
  AND NOT EXISTS (
      SELECT FROM rollouts_rollout r WHERE r.group_id = g.id AND (r.state = 'evaluating' OR r.finished_at IS NOT NULL)
        AND r.policy_version IS NOT NULL)
  AND NOT EXISTS (SELECT FROM rollouts_rollout r WHERE r.group_id = g.id AND r.state = 'running')
"""
# Two halves, since each has an index of its own: queues are long.
_GONE = """
WITH waits AS (
    SELECT r.id, r.attempt, r.state, r.run_id, r.required_version AS version FROM rollouts_rollout r
    WHERE r.required_version IS NOT NULL AND r.finished_at IS NULL
      AND r.state IN ('queued', 'ready') AND r.lease_owner_id IS NULL
    UNION ALL
    SELECT r.id, r.attempt, r.state, r.run_id, g.policy_version FROM rollouts_run run
    JOIN rollouts_rollout r ON r.run_id = run.id JOIN rollouts_group g ON g.id = r.group_id
    WHERE run.settings ->> 'versions' = %(group)s AND run.finished_rollouts < run.used_rollouts
      AND r.required_version IS NULL AND r.state IN ('queued', 'ready') AND r.lease_owner_id IS NULL
)
SELECT waits.id, waits.attempt, waits.state, waits.version FROM waits
JOIN rollouts_run run ON run.id = waits.run_id JOIN rollouts_policy p ON p.id = run.policy_id
WHERE (%(policy)s::uuid IS NULL OR p.id = %(policy)s) AND waits.version < p.version AND {gone}
"""
# A server that is dead or paused may come back with the version it has.
_NOBODY_SERVES = """NOT EXISTS (
    SELECT FROM rollouts_llmserver s
    WHERE s.policy_id = p.id AND s.policy_version = {version} AND NOT s.weights_unknown)"""
_FREE = _FREE_GROUPS.format(gone=_NOBODY_SERVES.format(version="g.policy_version"))
_FIND = _GONE.format(gone=_NOBODY_SERVES.format(version="waits.version"))


def end_gone(policy_id: UUID | None = None) -> int:
    """End those of a policy, or of all, that wait for a version which has passed; how many."""
    parameters: dict[str, Any] = {"policy": policy_id, "group": Versions.GROUP.value}
    with connection.cursor() as cursor:
        cursor.execute(_FREE, parameters)
        cursor.execute(_FIND, parameters)
        gone = cursor.fetchall()
    return sum(_end(rollout_id, attempt, State(state), version) for rollout_id, attempt, state, version in gone)


def _end(rollout_id: UUID, attempt: int, state: State, version: int) -> bool:
    stage, phase = (Stage.INIT, Phase.QUEUE) if state is State.QUEUED else (Stage.RUN, Phase.RUN)
    detail = f"it must be sampled from version {version}, which no LLM server has any more"
    rollout = Rollout.objects.select_related("run").defer("artefacts").get(pk=rollout_id)
    return give_up_attempt(
        rollout_id=rollout_id,
        guard=Guard([state], attempt, unheld=True),
        failure=Failure(Termination(phase, Cause.POLICY_VERSION_GONE, detail), retryable=False, traceback=""),
        stage=stage,
        settings=RunSettings.model_validate(rollout.run.settings),
    )


def check_required_version(policy: Policy, version: int, pointer: str) -> list[FieldError]:
    """What is wrong with asking for a version: it has passed, or nobody has said that it will come."""
    if version < 0:
        return [FieldError(pointer, "Must be at least 0.")]
    newest = newest_announced(policy)
    if version > newest + 1:
        return [FieldError(pointer, f"The newest version is {newest}; ask for at most the one after it.")]
    served = LLMServer.objects.filter(policy=policy, policy_version=version, weights_unknown=False)
    if version < policy.version and not served.exists():
        return [FieldError(pointer, f"No LLM server has version {version} any more; the policy is at {policy.version}.")]
    return []
