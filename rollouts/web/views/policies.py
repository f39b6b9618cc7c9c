"""Policies: their versions, the weight update that is under way, and who uses them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from rollouts.models import Policy, Run
from rollouts.selectors.dashboard import run_rows
from rollouts.selectors.policy_rows import policy_row, policy_rows, version_reports, versions_of
from rollouts.web.access import chosen_projects, visible_or_404, visible_projects
from rollouts.web.conditional import part
from rollouts.web.paging import page

POLL_SECONDS = 2
VERSIONS_PER_PAGE = 20
RUNS_SHOWN = 10


@require_safe
@login_required
def listing(request: HttpRequest) -> HttpResponse:
    """The policies of the visitor's projects."""
    projects = chosen_projects(request)
    context = {
        "rows": policy_rows(projects),
        "projects": visible_projects(request),
        "chosen": projects[0] if len(projects) == 1 else None,
        "section": "policies",
    }
    return render(request, "web/policies.html", context)


def _context(request: HttpRequest, policy_id: UUID) -> dict[str, Any]:
    policy = visible_or_404(request, Policy.objects.select_related("project"), pk=policy_id)
    row = policy_row(policy)
    versions = page(versions_of(policy), request.GET, VERSIONS_PER_PAGE)
    return {
        "policy": policy,
        "row": row,
        "update": version_reports([row.update])[0] if row.update else None,
        "reports": version_reports(versions.rows),
        "page": versions,
        "runs": run_rows(Run.objects.filter(policy=policy).select_related("project").order_by("-id")[:RUNS_SHOWN]),
        "poll_seconds": POLL_SECONDS,
        "projects": visible_projects(request),
        "chosen": policy.project,
        "section": "policies",
    }


@require_safe
@login_required
def detail(request: HttpRequest, policy_id: UUID) -> HttpResponse:
    """One policy."""
    return render(request, "web/policy.html", _context(request, policy_id))


@require_safe
@login_required
def live(request: HttpRequest, policy_id: UUID) -> HttpResponse:
    """The part that changes."""
    return part(request, "web/parts/policy_live.html", _context(request, policy_id))
