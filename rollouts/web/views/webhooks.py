"""Webhooks of a project: endpoints, what was sent to them, and sending it again."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from rollouts.models import WebhookDelivery, WebhookEndpoint
from rollouts.selectors.webhooks import deliveries_of, delivery_counts, endpoints_of
from rollouts.services import webhooks
from rollouts.web.access import chosen_projects, visible_or_404, visible_projects
from rollouts.web.paging import page

PAGE_SIZE = 50


@require_safe
@login_required
def listing(request: HttpRequest) -> HttpResponse:
    """The endpoints of the visitor's projects."""
    projects = chosen_projects(request)
    endpoints = page(endpoints_of(projects), request.GET, PAGE_SIZE)
    counts = delivery_counts(endpoints.rows)
    context = {
        "rows": [(endpoint, counts[endpoint.id]) for endpoint in endpoints.rows],
        "page": endpoints,
        "projects": visible_projects(request),
        "chosen": projects[0] if len(projects) == 1 else None,
        "section": "webhooks",
    }
    return render(request, "web/webhooks.html", context)


def _endpoint(request: HttpRequest, endpoint_id: UUID) -> WebhookEndpoint:
    return visible_or_404(request, WebhookEndpoint.objects.select_related("project", "run"), pk=endpoint_id)


@require_safe
@login_required
def detail(request: HttpRequest, endpoint_id: UUID) -> HttpResponse:
    """One endpoint with its messages, newest first; `?state=` narrows them."""
    endpoint = _endpoint(request, endpoint_id)
    state = request.GET.get("state", "")
    wanted = state if state in WebhookDelivery.State.values else None
    context = {
        "endpoint": endpoint,
        "counts": delivery_counts([endpoint])[endpoint.id],
        "state": wanted,
        "page": page(deliveries_of(endpoint, wanted), request.GET, PAGE_SIZE),
        "projects": visible_projects(request),
        "chosen": endpoint.project,
        "section": "webhooks",
    }
    return render(request, "web/webhook.html", context)


@require_POST
@login_required
def replay(request: HttpRequest, endpoint_id: UUID, delivery_id: UUID) -> HttpResponse:
    """Send one message again."""
    endpoint = _endpoint(request, endpoint_id)
    webhooks.replay(delivery=get_object_or_404(WebhookDelivery, endpoint=endpoint, pk=delivery_id))
    messages.success(request, "The message will be sent again.")
    return redirect("webhook", endpoint_id=endpoint.pk)


@require_POST
@login_required
def replay_failed(request: HttpRequest, endpoint_id: UUID) -> HttpResponse:
    """Send again what failed within the last week."""
    endpoint = _endpoint(request, endpoint_id)
    n = webhooks.replay_failed(endpoint=endpoint, since=timezone.now() - timedelta(days=7))
    messages.success(request, f"{n} message{'' if n == 1 else 's'} will be sent again.")
    return redirect("webhook", endpoint_id=endpoint.pk)
