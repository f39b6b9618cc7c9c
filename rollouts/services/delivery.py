"""The outbox: messages are taken to be sent, and what came of each attempt decides when the next one is."""

from __future__ import annotations

import json
import random
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from rollouts.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint

from .delivery_http import TIMEOUT_SECONDS, Answer
from .storable import storable_text

# A message that was taken and not heard of again (the sender was killed) is due again after this long.
_TAKEN_FOR = timedelta(seconds=2 * TIMEOUT_SECONDS)
_GONE = 410


class Sending(NamedTuple):
    """A message in the hands of a sender. Later writes are guarded by `tries`."""

    delivery_id: UUID
    endpoint_id: UUID
    tries: int
    url: str
    message_id: str
    body: str
    secrets: list[str]


def endpoints_with_work() -> list[UUID]:
    """Enabled endpoints for which a message is due."""
    due = WebhookDelivery.objects.filter(_due(timezone.now()), endpoint__disabled_at=None)
    return list(due.order_by().values_list("endpoint_id", flat=True).distinct())


def take_due(*, endpoint_id: UUID, limit: int) -> list[Sending]:
    """Take at most `limit` due messages of one endpoint, the longest due first. Two senders never take the same one."""
    now = timezone.now()
    with transaction.atomic():
        endpoint = WebhookEndpoint.objects.filter(id=endpoint_id, disabled_at=None).first()
        if endpoint is None:
            return []
        due = WebhookDelivery.objects.filter(_due(now), endpoint=endpoint).order_by("next_attempt_at")
        taken = list(due.select_for_update(skip_locked=True)[:limit])
        ids = [delivery.id for delivery in taken]
        WebhookDelivery.objects.filter(id__in=ids).update(tries=F("tries") + 1, next_attempt_at=now + _TAKEN_FOR)
    secrets = [endpoint.secret]
    if endpoint.old_secret_expires_at and endpoint.old_secret_expires_at > now:
        secrets.append(endpoint.old_secret)
    return [
        Sending(
            delivery_id=delivery.id,
            endpoint_id=endpoint.id,
            tries=delivery.tries + 1,
            url=endpoint.url,
            message_id=delivery.message_id,
            body=json.dumps(delivery.payload, separators=(",", ":")),
            secrets=secrets,
        )
        for delivery in taken
    ]


def _due(now: datetime) -> Q:
    return Q(state=WebhookDelivery.State.PENDING, next_attempt_at__lte=now)


def note_answer(*, sending: Sending, answer: Answer) -> None:
    """Keep the attempt, and settle the message or plan the next attempt. 410 Gone and long failure disable the endpoint."""
    now = timezone.now()
    with transaction.atomic():
        if not WebhookDelivery.objects.select_for_update().filter(id=sending.delivery_id).exists():
            return  # the endpoint was removed meanwhile
        WebhookAttempt.objects.create(
            delivery_id=sending.delivery_id,
            at=now - timedelta(seconds=answer.seconds),
            duration=answer.seconds,
            status=answer.status,
            error=storable_text(answer.error),
            response=storable_text(answer.body),
        )
        current = WebhookDelivery.objects.filter(
            id=sending.delivery_id, tries=sending.tries, state=WebhookDelivery.State.PENDING
        )
        if answer.ok:
            current.update(state=WebhookDelivery.State.DELIVERED, settled_at=now)
        elif answer.status == _GONE or sending.tries > len(settings.WEBHOOK_RETRY_SECONDS):
            current.update(state=WebhookDelivery.State.FAILED, settled_at=now)
        else:
            pause = settings.WEBHOOK_RETRY_SECONDS[sending.tries - 1] * random.uniform(0.8, 1.2)  # noqa: S311
            current.update(next_attempt_at=now + timedelta(seconds=pause))
        _note_health(sending.endpoint_id, answer, now)


def _note_health(endpoint_id: UUID, answer: Answer, now: datetime) -> None:
    endpoint = WebhookEndpoint.objects.filter(id=endpoint_id)
    if answer.ok:
        endpoint.exclude(failing_since=None).update(failing_since=None)
        return
    endpoint.filter(failing_since=None).update(failing_since=now)
    too_long = now - timedelta(days=settings.WEBHOOK_DISABLE_DAYS)
    enabled = endpoint.filter(disabled_at=None)
    if answer.status == _GONE:
        enabled.update(disabled_at=now, disabled_reason="the receiver answered 410 Gone")
    else:
        reason = f"every attempt has failed for {settings.WEBHOOK_DISABLE_DAYS:g} days"
        enabled.filter(failing_since__lt=too_long).update(disabled_at=now, disabled_reason=reason)
