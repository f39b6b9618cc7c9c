"""LLM servers: how they are, what they have in hand, and the buttons that change what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from rollouts.models import LLMServer
from rollouts.selectors.server_rows import fleets, policies_of
from rollouts.services.errors import Refused
from rollouts.services.server_health import probe_servers
from rollouts.services.servers import remove_server, set_server_state
from rollouts.web.access import chosen_projects, visible_or_404, visible_projects
from rollouts.web.conditional import part

POLL_SECONDS = 5


def _context(request: HttpRequest) -> dict[str, Any]:
    projects = chosen_projects(request)
    return {
        "fleets": [fleet for fleet in fleets(policies_of(projects)) if fleet.rows],
        "may_change": request.user.has_perm("rollouts.change_llmserver"),
        "may_remove": request.user.has_perm("rollouts.delete_llmserver"),
        "poll_seconds": POLL_SECONDS,
        "projects": visible_projects(request),
        "chosen": projects[0] if len(projects) == 1 else None,
        "section": "servers",
    }


@require_safe
@login_required
def listing(request: HttpRequest) -> HttpResponse:
    """The servers of the visitor's projects, by policy."""
    return render(request, "web/servers.html", _context(request))


@require_safe
@login_required
def live(request: HttpRequest) -> HttpResponse:
    """The part that changes."""
    return part(request, "web/parts/servers_live.html", _context(request))


class Action(NamedTuple):
    """Something that can be done to a server. `asks`: what it brings, for actions that are confirmed first."""

    verb: str
    do: Callable[[LLMServer], object]
    done: str
    asks: str = ""
    permission: str = "rollouts.change_llmserver"


_ACTIONS = {
    "pause": Action(
        "Pause",
        lambda server: set_server_state(server=server, state="paused"),
        "takes no calls.",
        "It takes no calls until it is resumed. Turns go to another server of the policy, or wait.",
    ),
    "resume": Action("Resume", lambda server: set_server_state(server=server, state="live"), "takes part again."),
    "probe": Action("Probe", lambda server: probe_servers([server]), "was probed."),
    "remove": Action(
        "Remove",
        lambda server: remove_server(server=server),
        "was removed.",
        "Rollouts that are on it go on at another server of the policy with their next turn. Stored model calls stay.",
        permission="rollouts.delete_llmserver",
    ),
}


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def act(request: HttpRequest, server_id: UUID, name: str) -> HttpResponse:
    """Do one thing to a server, after asking where it matters."""
    action = _ACTIONS.get(name)
    if action is None:
        raise Http404
    server = visible_or_404(request, LLMServer.objects.select_related("project", "policy"), pk=server_id)
    if not request.user.has_perm(action.permission):
        raise PermissionDenied
    if request.method != "POST":
        context = {
            "title": f"{action.verb} {server.url}?",
            "text": action.asks,
            "verb": action.verb,
            "back": f"{reverse('servers')}#server-{server.pk}",
            "projects": visible_projects(request),
            "chosen": server.project,
            "section": "servers",
        }
        return render(request, "web/confirm.html", context)
    try:
        action.do(server)
    except Refused as refused:
        messages.error(request, refused.detail)
    else:
        messages.success(request, f"{server.url} {action.done}")
    return redirect("servers")
