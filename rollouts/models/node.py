"""Worker hosts and the worker processes on them. A rollout's lease is its worker process's lease."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils import timezone

from rollouts.lifecycle import Stage

from .fields import uuid7


class WorkerProcess(models.Model):
    """One worker process of one stage on one node.

    It renews `lease_expires_at` every few seconds. Once that is past, the reaper sets `lost_at` and takes back everything the
    process held; a process that wakes up later finds itself lost and starts over under a new id.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    node = models.CharField(max_length=100)
    stage = models.CharField(max_length=10, choices=[(s.value, s.value) for s in Stage])
    pid = models.PositiveIntegerField()
    concurrency = models.PositiveIntegerField(help_text="Rollouts it works on at once.")
    started_at = models.DateTimeField(default=timezone.now)
    lease_expires_at = models.DateTimeField()
    stopped_at = models.DateTimeField(null=True, help_text="It said goodbye.")
    lost_at = models.DateTimeField(null=True, help_text="Its lease ran out.")

    class Meta:
        ordering: ClassVar = ["-started_at"]
        verbose_name_plural = "worker processes"
        indexes: ClassVar = [
            models.Index(fields=["stage", "node"], name="worker_live", condition=models.Q(stopped_at=None, lost_at=None)),
        ]

    def __str__(self) -> str:
        return f"{self.stage}@{self.node} pid {self.pid}"
