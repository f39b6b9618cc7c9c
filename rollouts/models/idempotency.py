"""Answers kept so that a repeated request creates nothing twice."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils import timezone

from .project import Project


class IdempotentResponse(models.Model):
    """The answer to a creating request that carried an `Idempotency-Key`. Inserted first, so a twin conflicts."""

    id = models.BigAutoField(primary_key=True)
    project = models.ForeignKey(Project, models.CASCADE, related_name="+")
    key = models.CharField(max_length=200)
    fingerprint = models.CharField(max_length=64, help_text="SHA-256 of method, path and body.")
    status = models.PositiveSmallIntegerField(null=True)
    body: models.JSONField[Any, Any] = models.JSONField(null=True)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["project", "key"], name="idempotency_key_once")]

    def __str__(self) -> str:
        return self.key
