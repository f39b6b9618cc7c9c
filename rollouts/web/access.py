"""Who may open a page. Another project's rows do not exist for a visitor: the answer is 404."""

from __future__ import annotations

from typing import Any, TypeVar

from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest
from django.shortcuts import get_object_or_404

from rollouts.models import Project
from rollouts.selectors.dashboard import projects_of

ModelT = TypeVar("ModelT", bound=Model)
_CACHE = "_visible_projects"


def visible_projects(request: HttpRequest) -> list[Project]:
    """The visitor's projects by name; read once for each request."""
    projects: list[Project] | None = getattr(request, _CACHE, None)
    if projects is None:
        projects = list(projects_of(request.user))
        setattr(request, _CACHE, projects)
    return projects


def chosen_projects(request: HttpRequest) -> list[Project]:
    """All visible projects, or only the one that `?project=` names (404 when it is not the visitor's)."""
    projects = visible_projects(request)
    name = request.GET.get("project")
    if not name:
        return projects
    chosen = [project for project in projects if project.name == name]
    if not chosen:
        raise Http404("no such project")
    return chosen


def visible_or_404(request: HttpRequest, queryset: QuerySet[ModelT], **lookup: Any) -> ModelT:
    """One row of a model with a `project` column, if it is in a project of the visitor."""
    return get_object_or_404(queryset, project__in=visible_projects(request), **lookup)
