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
from rollouts.services.server_sleep import wake_server
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
    """Something that can be done to a server, and tells what came of it. `asks`: what it brings, where that is asked first."""

    verb: str
    do: Callable[[LLMServer], str]
    asks: str = ""
    permission: str = "rollouts.change_llmserver"


def _pause(server: LLMServer) -> str:
    set_server_state(server=server, state="paused")
    return "takes no calls."


def _drain(server: LLMServer) -> str:
    set_server_state(server=server, state="draining")
    return "gets no new rollouts."


def _resume(server: LLMServer) -> str:
    set_server_state(server=server, state="live")
    return "takes part again."


def _wake(server: LLMServer) -> str:
    wake_server(server=server)
    return "is awake and takes calls again."


def _probe(server: LLMServer) -> str:
    probe_servers([server])
    server.refresh_from_db()
    return f"is {server.health}. {server.last_error}"


def _remove(server: LLMServer) -> str:
    remove_server(server=server)
    return "was removed."


_ACTIONS = {
    "pause": Action("Pause", _pause, "It takes no calls until it is resumed. Turns go to another server, or wait."),
    "drain": Action("Drain", _drain, "It gets no new rollouts until it is resumed. Those it has stay to their end."),
    "resume": Action("Resume", _resume),
    "wake": Action(
        "Wake",
        _wake,
        "It takes the memory of its GPU again, which nothing else may hold any more, and then calls. One that dropped its "
        "weights (level 2) is for its trainer to wake, who has new ones for it.",
    ),
    "probe": Action("Probe", _probe),
    "remove": Action(
        "Remove",
        _remove,
        "Rollouts that are on it go on at another server of the policy with their next turn. Stored model calls stay.",
        "rollouts.delete_llmserver",
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
        messages.success(request, f"{server.url} {action.do(server)}")
    except Refused as refused:
        messages.error(request, " ".join([refused.detail, *(error.detail for error in refused.errors)]))
    return redirect("servers")
