"""Which LLM server a rollout is sampled by. One function in the database decides it for all workers (migration 0006)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings

from rollouts.lifecycle import State
from rollouts.llm.types import ServerAddress
from rollouts.models import LLMServer
from rollouts.prepared import execute_prepared

# A rollout leaves its server, or its group's, for one that is less busy by more than this share of its room.
SLACK = 0.25


@dataclass(frozen=True)
class SeenServer:
    """An LLM server as it was when somebody looked. `room` is how many rollouts it may hold, None while it is given none."""

    id: UUID
    policy_id: UUID
    address: ServerAddress
    admission: str
    health: str
    hold: str
    room: int | None
    running: int

    @property
    def used(self) -> float:
        """The share of its room that is taken."""
        return self.running / self.room if self.room else 1.0


_CHOOSE = """
SELECT rollout_id, server_id
FROM rollouts_assign_servers(%(wanted)s, %(avoided)s, %(slack)s, %(slow_start)s, COALESCE(%(at)s::timestamptz, now()))
"""


def choose_servers(
    rollout_ids: Sequence[UUID], *, avoid: Collection[UUID] = (), at: datetime | None = None
) -> dict[UUID, UUID]:
    """A server for each rollout, by the rules of docs/guide/model-servers.md; one that no server has room for is left out.

    The servers' rows stay locked until the transaction of the caller ends, who stores the choice in it. `at` is the moment for
    which slow starts are reckoned; None: now.
    """
    return dict(execute_prepared(_CHOOSE, _rules(rollout_ids, avoid, at)))


_MOVE = f"""
WITH chosen AS MATERIALIZED ({_CHOOSE}), moved AS (
    UPDATE rollouts_rollout r SET llm_server_id = chosen.server_id FROM chosen
    WHERE r.id = chosen.rollout_id AND r.state = %(state)s AND r.attempt = %(attempt)s AND r.lease_owner_id = %(owner)s
      AND r.llm_server_id IS DISTINCT FROM chosen.server_id
)
SELECT server_id FROM chosen
"""  # noqa: S608 - constants


def move_rollout(
    *, rollout_id: UUID, attempt: int, owner: UUID, avoid: Collection[UUID] = (), at: datetime | None = None
) -> UUID | None:
    """Choose anew for a rollout that runs: its present server unless another is much less busy; None when there is none.

    Stored, and counted for the server from then on, while the rollout is still that attempt of that worker process.
    """
    guard = {"state": State.RUNNING.value, "attempt": attempt, "owner": owner}
    chosen = execute_prepared(_MOVE, {**_rules([rollout_id], avoid, at), **guard})
    return chosen[0][0] if chosen else None


def _rules(rollout_ids: Sequence[UUID], avoid: Collection[UUID], at: datetime | None) -> Mapping[str, Any]:
    return {
        "wanted": list(rollout_ids),
        "avoided": list(avoid),
        "slack": SLACK,
        "slow_start": settings.SLOW_START_SECONDS,
        "at": at,
    }


_SEE = """
SELECT s.id, s.policy_id, ARRAY(SELECT jsonb_array_elements_text(s.capabilities -> 'features')),
       json_build_object(
           'url', s.url, 'model', s.model, 'policy', p.name, 'policy_version', s.policy_version, 'engine', s.engine,
           'max_model_len', s.max_model_len, 'api_key', s.api_key, 'tokenizer', s.tokenizer, 'tool_format', s.tool_format,
           'picture_id', s.capabilities -> 'picture_id'
       )::text,
       s.admission, s.health, s.hold, usable.room,
       (SELECT count(*) FROM rollouts_rollout r WHERE r.llm_server_id = s.id AND r.state = 'running')
FROM rollouts_llmserver s JOIN rollouts_policy p ON p.id = s.policy_id
LEFT JOIN rollouts_usable_servers(now(), %(slow_start)s) usable ON usable.id = s.id
WHERE s.policy_id = ANY(%(policies)s)
"""


def see_servers(policies: Collection[UUID]) -> list[SeenServer]:
    """All servers of these policies, in one statement."""
    parameters = {"policies": list(policies), "slow_start": settings.SLOW_START_SECONDS}
    return [_seen(*row) for row in execute_prepared(_SEE, parameters)]


def _seen(id_: UUID, policy_id: UUID, features: list[str], where: str, *state: Any) -> SeenServer:
    address = ServerAddress(server_id=str(id_), features=frozenset(features), **json.loads(where))
    return SeenServer(id_, policy_id, address, *state)


def address_of(server: LLMServer) -> ServerAddress:
    """Where its calls go. The server comes with its policy."""
    return ServerAddress(
        url=server.url,
        model=server.model,
        policy=server.policy.name,
        policy_version=server.policy_version,
        max_model_len=server.max_model_len,
        server_id=str(server.id),
        api_key=server.api_key,
        engine=server.engine,
        features=frozenset(server.capabilities.get("features", ())),
        tokenizer=server.tokenizer,
        tool_format=server.tool_format,
        picture_id=server.capabilities.get("picture_id"),
    )
