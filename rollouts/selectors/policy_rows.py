"""What the pages show of policies: their versions, how far each announcement is, and who uses them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.db.models import QuerySet

from rollouts.models import LLMServer, Policy, PolicyVersion, Project

from .server_rows import Fleet, fleets, policies_of

_ENDED = (PolicyVersion.State.LIVE, PolicyVersion.State.FAILED)


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
    return PolicyRow(fleets([policy])[0], _unfinished([policy]).last())


def _unfinished(policies: Iterable[Policy]) -> QuerySet[PolicyVersion]:
    """What was announced and has not ended; of each policy the last, of the lowest version, is the one that is worked on."""
    return PolicyVersion.objects.filter(policy__in=list(policies)).exclude(state__in=_ENDED).order_by("-version")


def versions_of(policy: Policy) -> QuerySet[PolicyVersion]:
    return PolicyVersion.objects.filter(policy=policy)


class ServerReport(NamedTuple):
    """What became of an announcement on one server; `name` is its URL, or the end of its id once it was removed."""

    name: str
    state: str
    error: str
    seconds: float | None


class VersionReport(NamedTuple):
    """An announcement with what became of it on every server: on those that have it, and on the others."""

    version: PolicyVersion
    loaded: list[ServerReport]
    others: list[ServerReport]


def version_reports(announcements: Iterable[PolicyVersion]) -> list[VersionReport]:
    """The reports of some announcements, in one query."""
    announcements = list(announcements)
    ids = {server_id for announcement in announcements for server_id in announcement.report}
    names = {str(pk): url for pk, url in LLMServer.objects.filter(pk__in=ids).values_list("pk", "url")}
    found = []
    for announcement in announcements:
        results = [_report(names.get(id_, f"…{id_[-8:]}"), result) for id_, result in sorted(announcement.report.items())]
        loaded = [result for result in results if result.state == PolicyVersion.State.LIVE]
        found.append(VersionReport(announcement, loaded, [result for result in results if result not in loaded]))
    return found


def _report(name: str, result: dict[str, Any]) -> ServerReport:
    return ServerReport(name, result.get("state", ""), result.get("error", ""), result.get("seconds"))
