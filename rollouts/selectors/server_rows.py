"""What the pages show of LLM servers: each policy's servers with what they have in hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from django.db.models import Count

from rollouts.lifecycle import State
from rollouts.models import LLMServer, Policy, Project, Rollout


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
    """A server and how many rollouts in RUN are on it."""

    server: LLMServer
    in_flight: int

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
    def capacity(self) -> int:
        """Of the servers that may get rollouts."""
        return sum(row.server.capacity for row in self.rows if row.server.state == LLMServer.Health.LIVE)


def fleets(policies: Iterable[Policy]) -> list[Fleet]:
    """The servers of some policies, in two queries; a policy without any has an empty fleet."""
    policies = list(policies)
    servers: defaultdict[UUID, list[LLMServer]] = defaultdict(list)
    for server in LLMServer.objects.filter(policy__in=policies).order_by("url", "model"):
        servers[server.policy_id].append(server)
    in_flight = _in_flight([server for some in servers.values() for server in some])
    return [Fleet(policy, [ServerRow(one, in_flight[one.pk]) for one in servers[policy.pk]]) for policy in policies]


def _in_flight(servers: Sequence[LLMServer]) -> Counter[UUID]:
    running = Rollout.objects.filter(state=State.RUNNING, llm_server__in=servers)
    return Counter(dict(running.order_by().values_list("llm_server_id").annotate(Count("id"))))


def policies_of(projects: Iterable[Project]) -> list[Policy]:
    """All policies of some projects by name."""
    return list(Policy.objects.filter(project__in=list(projects)).select_related("project").order_by("name", "id"))
