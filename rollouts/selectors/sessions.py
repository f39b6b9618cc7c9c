"""Sessions of agents outside any sandbox, as the rollouts that they are."""

from __future__ import annotations

from django.db.models import QuerySet

from rollouts.models import Project, Rollout

from .rollouts import listed_rollouts


def sessions_of(project: Project) -> QuerySet[Rollout]:
    """Each with its `session`."""
    return listed_rollouts().select_related("session").filter(session__project=project)


def listed_sessions(*, project: Project | None = None, state: str = "") -> QuerySet[Rollout]:
    """Those of all projects or of one, in any state or in this one; each with its `session` and that one's project."""
    sessions = listed_rollouts().select_related("session__project").filter(session__isnull=False)
    wanted = {"session__project": project, "state": state}
    return sessions.filter(**{name: value for name, value in wanted.items() if value})
