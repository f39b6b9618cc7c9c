"""Where a project wants to be told of what ended, and every message with each attempt to deliver it."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils import timezone

from .fields import uuid7
from .project import Project
from .run import Run


class WebhookEvent(models.TextChoices):
    """What a receiver can be told of."""

    ROLLOUT_FINISHED = "rollout.finished", "rollout.finished: a rollout has ended, whatever its end"
    GROUP_FINISHED = "group.finished", "group.finished: all rollouts of a group have ended"
    RUN_FINISHED = "run.finished", "run.finished: all rollouts submitted to a run so far have ended"
    RUN_BUDGET_EXHAUSTED = "run.budget_exhausted", "run.budget_exhausted: a run has used up one of its budgets"


class WebhookEndpoint(models.Model):
    """A URL that gets signed POSTs (Standard Webhooks). The secrets are needed to sign, so they are stored as they are."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    project = models.ForeignKey(Project, models.CASCADE, related_name="webhooks")
    run = models.ForeignKey(Run, models.CASCADE, null=True, blank=True, related_name="webhooks", help_text="Only of this run.")
    # No URLField: it refuses the short host names of a cluster.
    url = models.CharField(max_length=500)
    description = models.CharField(max_length=300, blank=True)
    event_types = ArrayField(models.CharField(max_length=30, choices=WebhookEvent.choices))
    secret = models.CharField(max_length=100, editable=False)
    old_secret = models.CharField(max_length=100, blank=True, editable=False, help_text="Also signs until it expires.")
    old_secret_expires_at = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    failing_since = models.DateTimeField(null=True, editable=False, help_text="First failed attempt since the last success.")
    disabled_at = models.DateTimeField(null=True, editable=False)
    disabled_reason = models.CharField(max_length=200, blank=True, editable=False)

    class Meta:
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [models.Index(fields=["project", "-id"], name="webhook_list")]

    def __str__(self) -> str:
        return self.url


class WebhookDelivery(models.Model):
    """One message for one endpoint. The payload is kept, so that every attempt sends the same bytes under the same id."""

    class State(models.TextChoices):
        PENDING = "pending", "pending: to be sent, now or after a failure"
        DELIVERED = "delivered", "delivered: the receiver said 2xx"
        FAILED = "failed", "failed: given up"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    endpoint = models.ForeignKey(WebhookEndpoint, models.CASCADE, related_name="deliveries")
    event_type = models.CharField(max_length=30, choices=WebhookEvent.choices)
    event_key = models.CharField(max_length=120, help_text="What happened to what; an endpoint hears of it once.")
    payload: models.JSONField[Any, Any] = models.JSONField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    tries = models.PositiveIntegerField(default=0, help_text="Attempts since it was made or last replayed.")
    next_attempt_at = models.DateTimeField(default=timezone.now)
    created_at = models.DateTimeField(default=timezone.now)
    settled_at = models.DateTimeField(null=True, help_text="When it was delivered or given up.")

    class Meta:
        ordering: ClassVar = ["-id"]
        verbose_name_plural = "webhook deliveries"
        indexes: ClassVar = [
            models.Index(fields=["endpoint", "next_attempt_at"], name="webhook_due", condition=models.Q(state="pending")),
            models.Index(fields=["endpoint", "-id"], name="webhook_delivery_list"),
            models.Index(fields=["settled_at"], name="webhook_settled", condition=models.Q(settled_at__isnull=False)),
        ]
        constraints: ClassVar = [models.UniqueConstraint(fields=["endpoint", "event_key"], name="webhook_event_once")]

    def __str__(self) -> str:
        return f"{self.event_key} {self.state}"

    @property
    def message_id(self) -> str:
        """The `webhook-id` header, the same in every attempt: receivers drop what they have seen by it."""
        return f"msg_{self.id.hex}"


class WebhookAttempt(models.Model):
    """One POST and what came back. `status` is null when no answer came."""

    id = models.BigAutoField(primary_key=True)
    delivery = models.ForeignKey(WebhookDelivery, models.CASCADE, related_name="attempts")
    at = models.DateTimeField(default=timezone.now)
    duration = models.FloatField(help_text="Seconds.")
    status = models.PositiveSmallIntegerField(null=True)
    error = models.CharField(max_length=300, blank=True)
    response = models.TextField(blank=True, help_text="The beginning of the answer's body.")

    class Meta:
        ordering: ClassVar = ["id"]

    def __str__(self) -> str:
        return f"{self.status or self.error} at {self.at}"
