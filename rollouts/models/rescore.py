"""Requests to score finished rollouts again."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.utils import timezone

from rollouts.lifecycle import Cause, RescoringState

from .environment import Environment
from .fields import choices
from .node import WorkerProcess
from .rollout import Rollout
from .run import Run

_OPEN = [RescoringState.QUEUED.value, RescoringState.RUNNING.value]


class Rescoring(models.Model):
    """One more evaluation of a finished rollout's stored artefacts. Written only by `rollouts.services.rescore`.

    A rollout has at most one that is not over. While one runs, its lease is that of the worker process that has it.
    """

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="rescorings")
    run = models.ForeignKey(Run, models.CASCADE, related_name="rescorings", help_text="The rollout's; for lists.")
    environment = models.ForeignKey(
        Environment, models.PROTECT, related_name="rescorings", help_text="The version whose `evaluate` scores."
    )
    state = models.CharField(max_length=10, choices=choices(RescoringState), default=RescoringState.QUEUED.value)
    tries = models.PositiveIntegerField(default=0, help_text="Times it was taken by a worker; fences late writes.")
    failures = models.PositiveIntegerField(default=0, help_text="Tries that failed.")
    owner = models.ForeignKey(WorkerProcess, models.PROTECT, null=True, related_name="rescorings")
    not_before = models.DateTimeField(null=True, help_text="Not taken before this moment (backoff).")
    sandbox_name = models.CharField(max_length=100, blank=True)

    requested_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True)
    reward_version = models.PositiveIntegerField(null=True, help_text="The version it wrote.")
    reward_before = models.FloatField(null=True)
    reward = models.FloatField(null=True)
    cause = models.CharField(max_length=30, blank=True, choices=choices(Cause), help_text="Of the last failure.")
    detail = models.TextField(blank=True)
    traceback = models.TextField(blank=True)

    class Meta:
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [
            models.Index(fields=["id"], name="rescoring_queue", condition=Q(state=RescoringState.QUEUED.value)),
            models.Index(fields=["owner"], name="rescoring_held", condition=Q(state=RescoringState.RUNNING.value)),
            models.Index(fields=["rollout", "-id"], name="rescoring_list"),
            models.Index(fields=["run", "-id"], name="rescoring_run_list"),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["rollout"], name="rescoring_open_once", condition=Q(state__in=_OPEN)),
            models.CheckConstraint(
                condition=Q(state=RescoringState.RUNNING.value, owner__isnull=False)
                | (~Q(state=RescoringState.RUNNING.value) & Q(owner__isnull=True)),
                name="rescoring_owner_while_running",
            ),
            models.CheckConstraint(
                condition=Q(state__in=_OPEN, finished_at__isnull=True) | (~Q(state__in=_OPEN) & Q(finished_at__isnull=False)),
                name="rescoring_finished_iff_over",
            ),
        ]

    def __str__(self) -> str:
        return f"rescoring {self.pk} of {self.rollout_id}"
