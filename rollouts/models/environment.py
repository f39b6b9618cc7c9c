"""Registered kinds of task, and the tasks."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils import timezone

from .fields import uuid7
from .project import Project, name_validator


class Environment(models.Model):
    """A versioned, registered kind of task: a handler and its validated configuration. Immutable once a dataset uses it."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    project = models.ForeignKey(Project, models.CASCADE, related_name="environments")
    name = models.CharField(max_length=60, validators=[name_validator])
    version = models.PositiveIntegerField(default=1)
    handler = models.CharField(max_length=60, help_text="Name in the entry point group `prorl.environments`.")
    config: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Checked against the handler's schema."
    )
    description = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar = ["name", "-version"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["project", "name", "version"], name="environment_version_once"),
        ]

    def __str__(self) -> str:
        return f"{self.name} v{self.version}"


class Dataset(models.Model):
    """A named list of tasks of one environment version."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    project = models.ForeignKey(Project, models.CASCADE, related_name="datasets")
    environment = models.ForeignKey(Environment, models.PROTECT, related_name="datasets")
    name = models.CharField(max_length=80, validators=[name_validator])
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar = ["-created_at"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["project", "name"], name="dataset_name_once")]

    def __str__(self) -> str:
        return self.name


class Task(models.Model):
    """One instance of an environment. A task that cannot be scored is kept with the reason, and never rolled out."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    dataset = models.ForeignKey(Dataset, models.CASCADE, related_name="tasks")
    key = models.CharField(max_length=200, help_text="The caller's own id, unique in the dataset.")
    payload: models.JSONField[Any, Any] = models.JSONField(default=dict)
    quarantine_reason = models.TextField(blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar = ["id"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["dataset", "key"], name="task_key_once")]

    def __str__(self) -> str:
        return self.key
