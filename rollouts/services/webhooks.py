"""Webhook endpoints: made and changed by their projects; what was sent can be sent again."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from rollouts.models import Project, Run, WebhookDelivery, WebhookEndpoint, WebhookEvent

from .delivery_http import refusal_of
from .errors import FieldError, Refused

_SECRET_BYTES = 32
MAX_ENDPOINTS = 50  # of one project: each finished rollout may become a row for every one of them


def create_endpoint(
    *, project: Project, url: str, event_types: Sequence[str], description: str = "", run: Run | None = None
) -> WebhookEndpoint:
    """Tell `url` of what ends from now on. Its `secret` is to be shown to the caller now and never again."""
    errors = [*_url_errors(url), *_event_type_errors(event_types)]
    if run is not None and run.project_id != project.id:
        errors.append(FieldError("/run", "There is no such run in this project."))
    if WebhookEndpoint.objects.filter(project=project).count() >= MAX_ENDPOINTS:
        errors.append(FieldError("", f"A project has at most {MAX_ENDPOINTS} webhooks. Remove one first."))
    _refuse(errors)
    return WebhookEndpoint.objects.create(
        project=project, run=run, url=url, description=description, event_types=_in_order(event_types), secret=_new_secret()
    )


def change_endpoint(
    *,
    endpoint: WebhookEndpoint,
    url: str | None = None,
    event_types: Sequence[str] | None = None,
    description: str | None = None,
    enabled: bool | None = None,
) -> WebhookEndpoint:
    """Change what is not None. Enabling sends what is still pending; of what ended while it was disabled nothing is sent."""
    _refuse([*([] if url is None else _url_errors(url)), *([] if event_types is None else _event_type_errors(event_types))])
    values: dict[str, object] = {}
    if url is not None:
        values["url"] = url
    if event_types is not None:
        values["event_types"] = _in_order(event_types)
    if description is not None:
        values["description"] = description
    if enabled is not None:
        values |= {"disabled_at": None if enabled else timezone.now(), "disabled_reason": "" if enabled else "by hand"}
        values |= {"failing_since": None}
    WebhookEndpoint.objects.filter(id=endpoint.id).update(**values)
    endpoint.refresh_from_db()
    return endpoint


def rotate_secret(*, endpoint: WebhookEndpoint, overlap: timedelta) -> WebhookEndpoint:
    """A new secret. Messages are signed with both for `overlap`, so that the receiver can change over in its own time."""
    WebhookEndpoint.objects.filter(id=endpoint.id, secret=endpoint.secret).update(
        secret=_new_secret(), old_secret=endpoint.secret, old_secret_expires_at=timezone.now() + overlap
    )
    endpoint.refresh_from_db()
    return endpoint


def remove_endpoint(*, endpoint: WebhookEndpoint) -> None:
    """Forget it, with everything that was sent to it."""
    WebhookEndpoint.objects.filter(id=endpoint.id).delete()


def replay(*, delivery: WebhookDelivery) -> None:
    """Send a message again, whatever became of it, under the same id. One that is pending anyway is left as it is."""
    _send_again(WebhookDelivery.objects.filter(id=delivery.id).exclude(state=WebhookDelivery.State.PENDING))


def replay_failed(*, endpoint: WebhookEndpoint, since: datetime) -> int:
    """Send again what was made since a moment and given up; how many messages."""
    return _send_again(endpoint.deliveries.filter(state=WebhookDelivery.State.FAILED, created_at__gte=since))


def _send_again(deliveries: QuerySet[WebhookDelivery]) -> int:
    return deliveries.update(state=WebhookDelivery.State.PENDING, tries=0, next_attempt_at=timezone.now(), settled_at=None)


def _url_errors(url: str) -> list[FieldError]:
    try:
        parts = urlsplit(url)
        port_is_sane = parts.port != 0
    except ValueError:
        return [FieldError("/url", "This is no URL.")]
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_sane or any(c <= " " for c in url):
        return [FieldError("/url", "Use http://host[:port]/path or https://host[:port]/path.")]
    if parts.username or parts.password or parts.fragment:
        return [FieldError("/url", "Leave out user names, passwords and fragments; messages are signed instead.")]
    if reason := refusal_of(parts.hostname, allow_private=settings.WEBHOOK_ALLOW_PRIVATE):
        return [FieldError("/url", reason)]
    return []


def _event_type_errors(event_types: Sequence[str]) -> list[FieldError]:
    if event_types and not set(event_types) - set(WebhookEvent.values):
        return []
    return [FieldError("/event_types", f"Choose at least one of {', '.join(WebhookEvent.values)}.")]


def _refuse(errors: list[FieldError]) -> None:
    if errors:
        raise Refused(" ".join(error.detail for error in errors), errors)


def _in_order(event_types: Sequence[str]) -> list[str]:
    return [event for event in WebhookEvent.values if event in event_types]


def _new_secret() -> str:
    return f"whsec_{base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()}"
