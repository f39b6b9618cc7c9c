"""Sessions of agents outside any sandbox, as the rollouts that they are."""

from __future__ import annotations

from django.db.models import QuerySet

from rollouts.models import Project, Rollout

from .rollouts import listed_rollouts


def sessions_of(project: Project) -> QuerySet[Rollout]:
    """Each with its `session`."""
    return listed_rollouts().select_related("session").filter(session__project=project)
