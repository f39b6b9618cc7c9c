"""Worker hosts, and the buttons that drain them."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from rollouts.models import Node
from rollouts.selectors.nodes import node_rows
from rollouts.services.nodes import drain_node, resume_node
from rollouts.web.access import visible_projects
from rollouts.web.conditional import part

POLL_SECONDS = 5
_may_drain = permission_required("rollouts.change_node", raise_exception=True)


def _context(request: HttpRequest) -> dict[str, Any]:
    return {
        "rows": node_rows(),
        "may_drain": request.user.has_perm("rollouts.change_node"),
        "poll_seconds": POLL_SECONDS,
        "projects": visible_projects(request),
        "section": "nodes",
    }


@require_safe
@login_required
def listing(request: HttpRequest) -> HttpResponse:
    """Every node: nodes belong to the installation, not to a project."""
    return render(request, "web/nodes.html", _context(request))


@require_safe
@login_required
def live(request: HttpRequest) -> HttpResponse:
    """The part that changes."""
    return part(request, "web/parts/nodes_live.html", _context(request))


@require_POST
@login_required
@_may_drain
def drain(request: HttpRequest, name: str) -> HttpResponse:
    """Start nothing on the node any more."""
    drain_node(node=get_object_or_404(Node, name=name))
    messages.success(request, f"{name} drains: it starts nothing any more, and may finish what it holds until its deadline.")
    return redirect("nodes")


@require_POST
@login_required
@_may_drain
def resume(request: HttpRequest, name: str) -> HttpResponse:
    """Let the node take part again."""
    resume_node(node=get_object_or_404(Node, name=name))
    messages.success(request, f"{name} takes part again.")
    return redirect("nodes")
