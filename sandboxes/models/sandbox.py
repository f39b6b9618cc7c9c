"""Sandboxes as rows: written before the start, so that whatever a crash leaves behind can be found."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models import Q
from django.utils import timezone


class Sandbox(models.Model):
    """One sandbox of one attempt of one rollout, or a warm one that waits for a rollout in the hands of a worker process.

    `rollout_id` and `holder` are no foreign keys: isolation does not know the RL domain.
    """

    name = models.CharField(max_length=100, primary_key=True)
    rollout_id = models.UUIDField(null=True, db_index=True)
    attempt = models.PositiveIntegerField(null=True)
    holder = models.UUIDField(null=True, help_text="The worker process that keeps it warm.")
    node = models.CharField(max_length=100)
    backend = models.CharField(max_length=20)
    image = models.CharField(max_length=80, blank=True, default="", help_text="Digest of the image; empty: the host's system.")
    enforced: models.JSONField[Any, Any] = models.JSONField(default=dict, help_text="Limit -> mechanism.")
    created_at = models.DateTimeField(default=timezone.now)
    ready_at = models.DateTimeField(null=True)
    stopped_at = models.DateTimeField(null=True, help_text="Proven empty, unless it was abandoned.")
    stop_reason = models.CharField(max_length=200, blank=True)
    stop_attempts = models.PositiveIntegerField(default=0, help_text="How often stopping it failed.")
    stop_error = models.TextField(blank=True, default="", help_text="What survived the last of these.")
    stop_retry_at = models.DateTimeField(null=True, help_text="It is tried again after this moment.")
    abandoned = models.BooleanField(default=False, help_text="Closed without proof: its node has been gone for too long.")

    class Meta:
        verbose_name_plural = "sandboxes"
        indexes: ClassVar = [
            models.Index(fields=["node"], name="sandbox_unstopped", condition=Q(stopped_at=None)),
            BrinIndex(fields=["created_at"], name="sandbox_age"),  # rows are in this order, so it costs next to nothing
        ]

    def __str__(self) -> str:
        return self.name
