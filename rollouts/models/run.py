"""Runs and groups: what a trainer asks for."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils import timezone

from .environment import Task
from .fields import uuid7
from .limits import HAS_BUDGET, Limits
from .llm_server import Policy
from .project import Project


class Run(Limits):
    """One training or evaluation job's settings. Its rollouts arrive in groups, over as long as it is open."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    project = models.ForeignKey(Project, models.CASCADE, related_name="runs")
    name = models.CharField(max_length=120)
    policy = models.ForeignKey(Policy, models.PROTECT, related_name="runs")
    priority = models.PositiveSmallIntegerField(default=50, help_text="0 to 100; higher goes first.")
    settings: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="See RunSettings; complete, defaults included."
    )
    cancelled_at = models.DateTimeField(null=True, editable=False)
    keep = models.BooleanField(default=False, help_text="Retention leaves its rollouts alone.")

    class Meta:
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [
            models.Index(fields=["project", "-id"], name="run_list"),
            models.Index(fields=["id"], name="run_budget", condition=HAS_BUDGET & models.Q(exhausted_at=None)),
            models.Index(fields=["id"], name="run_exhausted", condition=models.Q(exhausted_at__isnull=False)),
        ]
        constraints: ClassVar = [models.CheckConstraint(condition=models.Q(priority__lte=100), name="run_priority_0_to_100")]

    def __str__(self) -> str:
        return self.name


class Group(models.Model):
    """n rollouts of one task: GRPO's unit."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, models.CASCADE, related_name="groups", db_index=False)
    task = models.ForeignKey(Task, models.PROTECT, related_name="groups")
    n = models.PositiveSmallIntegerField()
    policy_version = models.PositiveIntegerField(
        null=True, help_text="The only version its rollouts are sampled from, once the first of them has started."
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar = ["id"]
        indexes: ClassVar = [models.Index(fields=["run", "-id"], name="group_list")]
        constraints: ClassVar = [models.CheckConstraint(condition=models.Q(n__gte=1), name="group_has_rollouts")]

    def __str__(self) -> str:
        return f"{self.task} x {self.n}"
