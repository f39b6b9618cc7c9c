"""What the pages show of LLM servers: each policy's servers with what they have in hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

from django.conf import settings

from rollouts.models import LLMServer, Policy, Project
from rollouts.prepared import execute_prepared


class Figure(NamedTuple):
    """A number that servers tell of themselves, by its key in `LLMServer.load`. A share is between 0 and 1."""

    key: str
    name: str
    meaning: str
    is_share: bool = False


FIGURES = (
    Figure("running", "Running", "Requests that it works on"),
    Figure("waiting", "Waiting", "Requests that wait in it"),
    Figure("kv_cache", "KV", "Share of its KV cache in use", is_share=True),
    Figure("prefix_hits", "Prefix", "Share of prompt tokens that its prefix cache had", is_share=True),
    Figure("tokens_per_second", "Tokens/s", "Tokens that it samples a second"),
)


class ServerRow(NamedTuple):
    """A server with what it has in hand.

    `room` is how many rollouts it may hold at present: fewer than its capacity in a slow start, None while it gets none.
    `callers` are the worker processes that a weight update still waits for.
    """

    server: LLMServer
    in_flight: int
    room: int | None
    callers: int

    @property
    def starts_slowly(self) -> bool:
        return self.room is not None and self.room < self.server.capacity

    @property
    def figures(self) -> list[tuple[Figure, float | None]]:
        return [(figure, self.server.load.get(figure.key)) for figure in FIGURES]


class FleetFigure(NamedTuple):
    """A figure over the servers that tell it; all None when none does."""

    figure: Figure
    mean: float | None
    low: float | None
    high: float | None


class Fleet(NamedTuple):
    """A policy with its servers."""

    policy: Policy
    rows: list[ServerRow]

    @property
    def in_flight(self) -> int:
        return sum(row.in_flight for row in self.rows)

    @property
    def figures(self) -> list[FleetFigure]:
        """The mean of each figure with the least and the most, so that one sick server shows."""
        found = []
        for figure in FIGURES:
            values = [value for row in self.rows if (value := row.server.load.get(figure.key)) is not None]
            told = (sum(values) / len(values), min(values), max(values)) if values else (None, None, None)
            found.append(FleetFigure(figure, *told))
        return found

    @property
    def room(self) -> int:
        """Rollouts that its servers may hold at present."""
        return sum(row.room or 0 for row in self.rows)


def fleets(policies: Iterable[Policy]) -> list[Fleet]:
    """The servers of some policies, in at most four queries; a policy without any has an empty fleet."""
    policies = list(policies)
    servers: defaultdict[UUID, list[LLMServer]] = defaultdict(list)
    for server in LLMServer.objects.filter(policy__in=policies).order_by("url", "model"):
        servers[server.policy_id].append(server)
    ids = [server.id for some in servers.values() for server in some]
    held = [server.id for some in servers.values() for server in some if server.hold]
    in_flight = dict(execute_prepared(_IN_FLIGHT, {"servers": ids})) if ids else {}
    rooms = dict(execute_prepared(_ROOMS, {"servers": ids, "slow_start": settings.SLOW_START_SECONDS})) if ids else {}
    callers = dict(execute_prepared(_CALLERS, {"servers": held})) if held else {}

    def row(server: LLMServer) -> ServerRow:
        return ServerRow(server, in_flight.get(server.id, 0), rooms.get(server.id), callers.get(server.id, 0))

    return [Fleet(policy, [row(server) for server in servers[policy.pk]]) for policy in policies]


_IN_FLIGHT = """
SELECT llm_server_id, count(*) FROM rollouts_rollout WHERE llm_server_id = ANY(%(servers)s) AND state = 'running' GROUP BY 1
"""
_ROOMS = "SELECT id, room FROM rollouts_usable_servers(now(), %(slow_start)s) WHERE id = ANY(%(servers)s)"
_CALLERS = """
SELECT r.llm_server_id, count(DISTINCT w.id)
FROM rollouts_rollout r JOIN rollouts_workerprocess w ON w.id = r.lease_owner_id
WHERE r.llm_server_id = ANY(%(servers)s) AND r.state = 'running' AND NOT r.llm_server_id = ANY(w.quiet_servers)
  AND w.stopped_at IS NULL AND w.lost_at IS NULL GROUP BY 1
"""


def policies_of(projects: Iterable[Project]) -> list[Policy]:
    """All policies of some projects by name."""
    return list(Policy.objects.filter(project__in=list(projects)).select_related("project").order_by("name", "id"))
