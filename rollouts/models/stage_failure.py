"""Every failure of a stage, also those that were repeated: the history behind a rollout's attempts."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils import timezone

from rollouts.lifecycle import AfterFailure, Blame, Cause, Stage

from .fields import choices
from .rollout import Rollout


class StageFailure(models.Model):
    """One failure: where, of whom, why, and what was done about it. EVAL can fail several times in one attempt."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="failures")
    attempt = models.PositiveIntegerField()
    stage = models.CharField(max_length=10, choices=choices(Stage))
    at = models.DateTimeField(default=timezone.now)
    # Not a foreign key: worker processes are forgotten sooner than rollouts.
    worker = models.UUIDField(null=True, help_text="The worker process that held it; null when nobody did.")
    node = models.CharField(max_length=100, blank=True)
    pid = models.PositiveIntegerField(null=True)
    cause = models.CharField(max_length=30, choices=choices(Cause))
    blame = models.CharField(max_length=15, choices=choices(Blame))
    detail = models.TextField(blank=True)
    traceback = models.TextField(blank=True)
    retried_as = models.CharField(max_length=10, choices=choices(AfterFailure))

    class Meta:
        ordering: ClassVar = ["id"]

    def __str__(self) -> str:
        return f"{self.stage} of {self.rollout_id} attempt {self.attempt}: {self.cause}"
