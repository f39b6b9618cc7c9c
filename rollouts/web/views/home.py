"""The overview of runs."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from rollouts.selectors.dashboard import run_rows, runs_of
from rollouts.web.access import chosen_projects, visible_projects
from rollouts.web.paging import page

PAGE_SIZE = 50


@require_safe
@login_required
def overview(request: HttpRequest) -> HttpResponse:
    """Runs of the visitor's projects, newest first."""
    projects = chosen_projects(request)
    runs = page(runs_of(projects), request.GET, PAGE_SIZE)
    context = {
        "rows": run_rows(runs.rows),
        "page": runs,
        "projects": visible_projects(request),
        "chosen": projects[0] if len(projects) == 1 else None,
        "section": "runs",
    }
    return render(request, "web/home.html", context)
