"""A worker takes rollouts: the only way into a held state."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import F, TextField
from django.db.models.functions import Cast, Coalesce

from rollouts.lifecycle import STAGES, EventKind, Stage
from rollouts.llm.types import ServerAddress
from rollouts.models import Rollout
from rollouts.run_settings import RunSettings

from .assign import address_of, choose_servers
from .transition import Guard, Move, move_each


@dataclass(frozen=True)
class Claim:
    """A rollout in the hands of one worker process, and all that its stage needs. Later writes are guarded by it."""

    rollout_id: UUID
    run_id: UUID
    project_id: UUID
    attempt: int
    owner: UUID
    stage: Stage
    node: str
    handler: str
    config: dict[str, Any]
    payload: dict[str, Any]
    settings: RunSettings
    sandbox_name: str
    artefacts: dict[str, Any]
    artefacts_blob: str | None
    termination_cause: str
    fidelity: str  # the badge that RUN gave it; empty before
    held_seconds: float  # workers have held this attempt before, in earlier stages and tries
    server: ServerAddress | None
    policy_id: UUID
    required_version: int | None  # the only policy version it may be sampled from, of its own or its group's

    @property
    def guard(self) -> Guard:
        """Holds as long as this claim is the current one."""
        return Guard(states=[STAGES[self.stage].holds_in], attempt=self.attempt, owner=self.owner)

    def move(self, *, values: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> Move:
        """Its part of a bulk move out of this stage, guarded likewise."""
        return Move(self.rollout_id, self.attempt, self.owner, values, data or {})


# A new attempt leaves nothing of the last one in the rollout's own row.
_FRESH: dict[str, Any] = {
    "not_before": None,
    "sandbox_name": "",
    "artefacts": {},
    "artefacts_blob_id": None,
    "fidelity": "",
    "policy_version": None,
    "oldest_version": None,
    "turns": 0,
    "prompt_tokens": 0,
    "sampled_tokens": 0,
}


def claim_rollouts(*, stage: Stage, rollout_ids: Sequence[UUID], owner: UUID, node: str) -> list[Claim]:
    """Take rollouts for a stage.

    Those that are not there to be taken (any more) are left out: late and repeated hints are harmless.
    """
    data = {"node": node, "worker": str(owner)}
    if stage is Stage.RUN:
        with transaction.atomic():
            servers = choose_servers(rollout_ids)
            moves = [Move(id_, values={"llm_server_id": server}, data=data) for id_, server in servers.items()]
            taken = _take(stage, moves, owner, node)
    else:
        taken = _take(stage, [Move(id_, data=data) for id_ in rollout_ids], owner, node)
    return load_claims(taken, owner, stage, node)


def _take(stage: Stage, moves: Sequence[Move], owner: UUID, node: str) -> list[UUID]:
    rule = STAGES[stage]
    moved = move_each(
        moves,
        to=rule.holds_in,
        states=[rule.waits_in],
        kind=EventKind.CLAIMED if stage is Stage.EVAL else EventKind.TRANSITION,
        new_attempt=stage is Stage.INIT,
        values={"node": node, **_FRESH} if stage is Stage.INIT else None,
        taker=owner,
    )
    return [m.id for m in moved]


def load_claims(ids: Sequence[UUID], owner: UUID, stage: Stage, node: str) -> list[Claim]:
    """What the stage needs to know. Under the claim nobody else changes these rows."""
    rollouts = (
        Rollout.objects.filter(id__in=ids)
        .select_related("environment", "task", "llm_server__policy")
        .only(
            *(
                "run_id",
                "project_id",
                "attempt",
                "sandbox_name",
                "artefacts",
                "artefacts_blob",
                "termination_cause",
                "fidelity",
            ),
            *("task__payload", "environment__handler", "environment__config"),
            # Named one by one: whatever is missing here costs a query for every rollout when it is read.
            *(f"llm_server__{name}" for name in ("url", "model", "policy__name", "policy_version", "max_model_len", "api_key")),
            *(f"llm_server__{name}" for name in ("engine", "tokenizer", "tool_format", "capabilities")),
        )
        .annotate(
            run_settings=Cast("run__settings", TextField()),
            policy_id=F("run__policy_id"),
            version=Coalesce("required_version", "group__policy_version"),
            held_seconds=F("init_seconds") + F("run_seconds") + F("eval_seconds"),
        )
    )
    return [
        Claim(
            rollout_id=rollout.id,
            run_id=rollout.run_id,
            project_id=rollout.project_id,
            attempt=rollout.attempt,
            owner=owner,
            stage=stage,
            node=node,
            handler=rollout.environment.handler,
            config=rollout.environment.config,
            payload=rollout.task.payload,
            settings=_parsed(rollout.run_settings),
            sandbox_name=rollout.sandbox_name,
            artefacts=rollout.artefacts,
            artefacts_blob=rollout.artefacts_blob_id,
            termination_cause=rollout.termination_cause,
            fidelity=rollout.fidelity,
            held_seconds=rollout.held_seconds,
            server=address_of(rollout.llm_server) if rollout.llm_server else None,
            policy_id=rollout.policy_id,
            required_version=rollout.version,
        )
        for rollout in rollouts
    ]


@functools.lru_cache(maxsize=256)
def _parsed(run_settings: str) -> RunSettings:
    """Thousands of rollouts of a run share their settings, and checking them again is dear."""
    return RunSettings.model_validate(json.loads(run_settings))
