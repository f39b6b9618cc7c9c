"""What the pages show of policies: their versions, how far each announcement is, and who uses them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import QuerySet

from rollouts.models import LLMServer, Policy, PolicyVersion, Project

from .server_rows import Fleet, fleets, policies_of

UNFINISHED = (PolicyVersion.State.ANNOUNCED, PolicyVersion.State.LOADING)


class PolicyRow(NamedTuple):
    """A policy with its servers, and the announcement that is under way."""

    fleet: Fleet
    update: PolicyVersion | None

    @property
    def policy(self) -> Policy:
        return self.fleet.policy

    @property
    def up_to_date(self) -> int:
        """Servers at the policy's version."""
        return sum(row.server.policy_version == self.policy.version for row in self.fleet.rows)


def policy_rows(projects: Iterable[Project]) -> list[PolicyRow]:
    """All policies of some projects, in four queries."""
    policies = policies_of(projects)
    updates = {update.policy_id: update for update in _unfinished(policies)}
    return [PolicyRow(fleet, updates.get(fleet.policy.pk)) for fleet in fleets(policies)]


def policy_row(policy: Policy) -> PolicyRow:
    """One policy."""
    return PolicyRow(fleets([policy])[0], _unfinished([policy]).first())


def _unfinished(policies: Iterable[Policy]) -> QuerySet[PolicyVersion]:
    return PolicyVersion.objects.filter(policy__in=list(policies), state__in=UNFINISHED).order_by("version")


def versions_of(policy: Policy) -> QuerySet[PolicyVersion]:
    return PolicyVersion.objects.filter(policy=policy)


class ServerReport(NamedTuple):
    """What became of an announcement on one server; `name` is its URL, or the end of its id once it was removed."""

    name: str
    state: str
    error: str
    seconds: float | None


def reports(announcements: Iterable[PolicyVersion]) -> dict[UUID, list[ServerReport]]:
    """The per-server results of some announcements, in one query."""
    announcements = list(announcements)
    ids = {server_id for announcement in announcements for server_id in announcement.report}
    names = {str(pk): url for pk, url in LLMServer.objects.filter(pk__in=ids).values_list("pk", "url")}
    found: defaultdict[UUID, list[ServerReport]] = defaultdict(list)
    for announcement in announcements:
        for server_id, result in announcement.report.items():
            found[announcement.pk].append(_report(names.get(server_id, f"…{server_id[-8:]}"), result))
    return found


def _report(name: str, result: dict[str, Any]) -> ServerReport:
    return ServerReport(name, result.get("state", ""), result.get("error", ""), result.get("seconds"))
