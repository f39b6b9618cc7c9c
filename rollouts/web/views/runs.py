"""One run: its numbers, its groups, and the button that stops it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from rollouts.lifecycle import Limit
from rollouts.models import Group, Rollout, Run
from rollouts.selectors.budgets import limit_uses
from rollouts.selectors.run_charts import reward_series
from rollouts.selectors.run_summary import group_rows, summarise
from rollouts.selectors.run_versions import run_versions
from rollouts.selectors.standstill import obstacles
from rollouts.selectors.tallies import cells_of
from rollouts.services.cancel import cancel_rollouts
from rollouts.web.access import visible_or_404, visible_projects
from rollouts.web.charts import reward_chart
from rollouts.web.conditional import clock, etag_of, fragment, unchanged
from rollouts.web.paging import page

GROUPS_PER_PAGE = 25
POLL_SECONDS = 3


def _run(request: HttpRequest, run_id: UUID) -> Run:
    return visible_or_404(request, Run.objects.select_related("project", "policy"), pk=run_id)


def _etag(run: Run) -> str:
    limits = [run.exhausted_at, run.finished_rollouts, *(run.maximum(limit) for limit in Limit)]
    cells = cells_of([run.pk])[run.pk]
    going_on = any(not cell.finished for cell in cells)
    return etag_of(run.pk, run.cancelled_at, limits, sorted(cells), clock() if going_on else None)


def _live_context(request: HttpRequest, run: Run) -> dict[str, Any]:
    groups = page(Group.objects.filter(run=run).select_related("task").defer("task__payload"), request.GET, GROUPS_PER_PAGE)
    summary = summarise(run)
    return {
        "run": run,
        "summary": summary,
        "chart": reward_chart(reward_series(run, summary.scored)),
        "versions": run_versions(run),
        "obstacles": obstacles(run),
        "limits": limit_uses(run),
        "poll_seconds": POLL_SECONDS,
        "groups": group_rows(groups.rows),
        "page": groups,
    }


@require_safe
@login_required
def detail(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """The run's page."""
    run = _run(request, run_id)
    etag = _etag(run)
    context = {
        **_live_context(request, run),
        "etag": etag,
        "projects": visible_projects(request),
        "chosen": run.project,
        "section": "runs",
    }
    return render(request, "web/run.html", context)


@require_safe
@login_required
def live(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """The part of the run's page that changes; 304 when it did not."""
    run = _run(request, run_id)
    etag = _etag(run)
    return unchanged(request, etag) or fragment(request, "web/parts/run_live.html", _live_context(request, run), etag)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def cancel(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """Ask, then cancel whatever of the run has not ended."""
    run = _run(request, run_id)
    if request.method == "POST":
        n = cancel_rollouts(project=run.project, run_id=run.pk)
        messages.success(request, f"Cancelling {n} rollout{'' if n == 1 else 's'}.")
        return redirect("run", run_id=run.pk)
    context = {
        "title": f"Cancel {run.name}?",
        "unfinished": Rollout.objects.filter(run=run, finished_at=None).count(),
        "back": "run",
        "back_id": run.pk,
        "projects": visible_projects(request),
        "chosen": run.project,
        "section": "runs",
    }
    return render(request, "web/confirm_cancel.html", context)
