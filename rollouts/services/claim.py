"""A worker takes a rollout: the only way into a held state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Count, F, FloatField, Q
from django.db.models.functions import Cast

from rollouts.lifecycle import STAGES, EventKind, Stage, State
from rollouts.llm.types import ServerAddress
from rollouts.models import Attempt, LLMServer, Rollout
from rollouts.run_settings import RunSettings

from .transition import Guard, move


@dataclass(frozen=True)
class Claim:
    """A rollout in the hands of one worker process, and all that its stage needs. Later writes are guarded by it."""

    rollout_id: UUID
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
    termination_cause: str
    server: ServerAddress | None

    @property
    def guard(self) -> Guard:
        """Holds as long as this claim is the current one."""
        return Guard(states=[STAGES[self.stage].holds_in], attempt=self.attempt, owner=self.owner)


def claim(*, stage: Stage, rollout_id: UUID, owner: UUID, node: str) -> Claim | None:
    """Take a rollout for a stage, or None when it is not there to be taken (any more): a late or repeated hint is harmless."""
    rule = STAGES[stage]
    guard = Guard(states=[rule.waits_in], unheld=True)
    values: dict[str, Any] = {"lease_owner_id": owner}
    with transaction.atomic():
        if stage is Stage.INIT:
            values |= {
                "node": node,
                "not_before": None,
                "sandbox_name": "",
                "artefacts": {},
                "fidelity": "",
                "policy_version": None,
            }
            values |= {"turns": 0, "prompt_tokens": 0, "sampled_tokens": 0}
        if stage is Stage.RUN:
            server = _choose_server(rollout_id)
            if server is None:
                return None
            values["llm_server_id"] = server.id
        moved = move(
            [rollout_id],
            to=rule.holds_in,
            guard=guard,
            kind=EventKind.CLAIMED if stage is Stage.EVAL else EventKind.TRANSITION,
            new_attempt=stage is Stage.INIT,
            values=values,
            data={"node": node, "worker": str(owner)},
        )
        if not moved:
            return None
        if stage is Stage.INIT:
            Attempt.objects.create(rollout_id=rollout_id, number=moved[0].attempt, node=node)
    return _load(rollout_id, moved[0].attempt, owner, stage, node)


def _load(rollout_id: UUID, attempt: int, owner: UUID, stage: Stage, node: str) -> Claim:
    rollout = Rollout.objects.select_related("environment", "task", "run", "llm_server__policy").get(id=rollout_id)
    server = rollout.llm_server
    return Claim(
        rollout_id=rollout_id,
        attempt=attempt,
        owner=owner,
        stage=stage,
        node=node,
        handler=rollout.environment.handler,
        config=rollout.environment.config,
        payload=rollout.task.payload,
        settings=RunSettings.model_validate(rollout.run.settings),
        sandbox_name=rollout.sandbox_name,
        artefacts=rollout.artefacts,
        termination_cause=rollout.termination_cause,
        server=_address(server) if server else None,
    )


def _choose_server(rollout_id: UUID) -> LLMServer | None:
    """The live server of the run's policy with the most free room, one that serves this group already before others.

    Group members share their prompt, so the server that has it in its prefix cache is preferred while it has room.
    """
    rollout = Rollout.objects.select_related("run").only("group_id", "run__policy_id").filter(id=rollout_id).first()
    if rollout is None:  # deleted since the hint, or a hint of another platform on the same broker
        return None
    running = Q(rollouts__state=State.RUNNING.value)
    return (
        LLMServer.objects.filter(policy_id=rollout.run.policy_id, state=LLMServer.Health.LIVE)
        .annotate(
            busy=Count("rollouts", filter=running),
            siblings=Count("rollouts", filter=running & Q(rollouts__group_id=rollout.group_id)),
            load=Cast(F("busy"), FloatField()) / F("capacity"),
        )
        .filter(busy__lt=F("capacity"))
        .order_by("-siblings", "load", "id")
        .first()
    )


def _address(server: LLMServer) -> ServerAddress:
    return ServerAddress(
        url=server.url,
        model=server.model,
        policy=server.policy.name,
        policy_version=server.policy_version,
        max_model_len=server.max_model_len,
        server_id=str(server.id),
        api_key=server.api_key,
    )
