"""The list of rollouts with its filters."""

from __future__ import annotations

from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_safe

from rollouts.models import Environment, Run
from rollouts.selectors.dashboard import any_rollouts, rollout_rows
from rollouts.web.access import chosen_projects, visible_or_404, visible_projects
from rollouts.web.filters import RolloutFilters
from rollouts.web.paging import page

PAGE_SIZE = 100


@require_safe
@login_required
def listing(request: HttpRequest) -> HttpResponse:
    """Rollouts of the visitor's projects, newest first, narrowed by the query string."""
    projects = chosen_projects(request)
    names = Environment.objects.filter(project__in=projects).order_by("name").values_list("name", flat=True).distinct()
    filters = RolloutFilters(request.GET, list(names))
    rollouts = page(rollout_rows(), request.GET, PAGE_SIZE, filters.wanted().branches(projects))
    run_id = filters.active.get("run")
    context = {
        "filters": filters,
        "page": rollouts,
        "run": Run.objects.filter(pk=run_id, project__in=projects).select_related("project").first() if run_id else None,
        "anything": bool(rollouts.rows) or any_rollouts(projects),
        "projects": visible_projects(request),
        "chosen": projects[0] if len(projects) == 1 else None,
        "section": "rollouts",
    }
    return render(request, "web/rollouts.html", context)


@require_safe
@login_required
def of_run(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """The list, narrowed to one run; other filters of the query string are kept."""
    run = visible_or_404(request, Run.objects.all(), pk=run_id)
    query = request.GET.copy()
    query["run"] = str(run.pk)
    return redirect(f"{reverse('rollouts')}?{query.urlencode()}")
