"""The announced versions of policies."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from django.db.models import QuerySet

from rollouts.models import Policy, PolicyVersion


def versions_of(policy: Policy) -> QuerySet[PolicyVersion]:
    """Newest first."""
    return PolicyVersion.objects.filter(policy=policy).select_related("policy").order_by("-version")


def version_states(ids: Collection[UUID]) -> dict[UUID, str]:
    """How far announcements are, in one query."""
    return dict(PolicyVersion.objects.filter(pk__in=ids).values_list("pk", "state"))
