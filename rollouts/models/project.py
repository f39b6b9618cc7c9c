"""Tenancy: every row of the domain belongs to one project, and every query names it."""

from __future__ import annotations

from typing import ClassVar

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.utils import timezone

from .fields import uuid7
from .limits import Limits

name_validator = RegexValidator(r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", "Use letters, digits, dots, dashes and underscores.")


class Project(Limits):
    """A tenant."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    name = models.CharField(max_length=60, unique=True, validators=[name_validator])
    members: models.ManyToManyField[models.Model, models.Model] = models.ManyToManyField(
        settings.AUTH_USER_MODEL, related_name="projects", blank=True, help_text="Who may see it in the dashboard."
    )
    keep_events_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Days after its end for which a rollout's history is kept; empty: for ever.",
    )
    keep_trajectories_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Days after its end for which a rollout's messages, model and tool calls are kept; empty: for ever.",
    )

    class Meta:
        ordering: ClassVar = ["name"]

    def __str__(self) -> str:
        return self.name


class Scope(models.TextChoices):
    """What an API key may do. Each includes those before it."""

    READ = "read", "read: look at everything of the project"
    SUBMIT = "submit", "submit: create datasets, runs and groups, cancel them"
    ADMIN = "admin", "admin: also environments and LLM servers"
    OPERATE = "operate", "operate: also drain and resume the nodes, which all projects share"


class ApiKey(models.Model):
    """A key as stored: found by its public id, checked against a SHA-256 of its secret. The secret is shown once."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    project = models.ForeignKey(Project, models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=60, help_text="What the key is for.")
    public_id = models.CharField(max_length=12, unique=True, editable=False)
    secret_sha256 = models.CharField(max_length=64, editable=False)
    scopes = ArrayField(models.CharField(max_length=10, choices=Scope.choices), help_text="read, submit, admin, operate")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.name} ({self.public_id})"
