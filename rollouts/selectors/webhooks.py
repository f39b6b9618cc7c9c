"""Webhook endpoints of projects, and what was sent to them."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from django.db.models import Count, QuerySet

from rollouts.models import Project, WebhookDelivery, WebhookEndpoint


def endpoints_of(projects: Iterable[Project]) -> QuerySet[WebhookEndpoint]:
    return WebhookEndpoint.objects.filter(project__in=projects).select_related("project", "run")


def deliveries_of(endpoint: WebhookEndpoint, state: str | None = None) -> QuerySet[WebhookDelivery]:
    """With their attempts; of one state or of all."""
    deliveries = WebhookDelivery.objects.filter(endpoint=endpoint).prefetch_related("attempts")
    return deliveries.filter(state=state) if state else deliveries


def delivery_counts(endpoints: Iterable[WebhookEndpoint]) -> dict[UUID, dict[str, int]]:
    """State -> number of messages, for several endpoints in one query."""
    found = {endpoint.id: dict.fromkeys(WebhookDelivery.State.values, 0) for endpoint in endpoints}
    rows = WebhookDelivery.objects.filter(endpoint__in=list(found)).order_by().values_list("endpoint_id", "state")
    for endpoint_id, state, count in rows.annotate(Count("id")):
        found[endpoint_id][state] = count
    return found
