"""The queue: why rollouts wait."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from rollouts.selectors.queue import read_queue
from rollouts.web.access import chosen_projects, visible_projects
from rollouts.web.conditional import part

POLL_SECONDS = 5


def _context(request: HttpRequest) -> dict[str, Any]:
    projects = chosen_projects(request)
    return {
        "queue": read_queue(projects),
        "poll_seconds": POLL_SECONDS,
        "projects": visible_projects(request),
        "chosen": projects[0] if len(projects) == 1 else None,
        "section": "queue",
    }


@require_safe
@login_required
def detail(request: HttpRequest) -> HttpResponse:
    """What waits at each stage, the runs of the visitor's projects, and what binds."""
    return render(request, "web/queue.html", _context(request))


@require_safe
@login_required
def live(request: HttpRequest) -> HttpResponse:
    """The part that changes."""
    return part(request, "web/parts/queue_live.html", _context(request))
