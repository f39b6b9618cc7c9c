"""Policies under training and the inference endpoints that serve them."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.validators import RegexValidator
from django.db import models
from django.utils import timezone

from .fields import uuid7
from .project import Project, name_validator

url_validator = RegexValidator(r"^https?://[^\s/?#]+(/[^\s?#]*)?\Z", "Use http://host:port or https://host:port.")


class Policy(models.Model):
    """A named model under training. `version` is the newest version the trainer announced."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    project = models.ForeignKey(Project, models.CASCADE, related_name="policies")
    name = models.CharField(max_length=100, validators=[name_validator])
    version = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar = ["name"]
        verbose_name_plural = "policies"
        constraints: ClassVar = [models.UniqueConstraint(fields=["project", "name"], name="policy_name_once")]

    def __str__(self) -> str:
        return self.name


class LLMServer(models.Model):
    """An inference endpoint that serves one policy at one version."""

    class Health(models.TextChoices):
        LIVE = "live", "live: gets rollouts"
        DEAD = "dead", "dead: did not answer its last probe"
        PAUSED = "paused", "paused: an admin or trainer holds it back"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    project = models.ForeignKey(Project, models.CASCADE, related_name="llm_servers")
    policy = models.ForeignKey(Policy, models.PROTECT, related_name="servers")
    policy_version = models.PositiveIntegerField(default=0)
    # No URLField: it refuses the short host names of a cluster.
    url = models.CharField(max_length=300, validators=[url_validator], help_text="Root of the server, without /v1.")
    model = models.CharField(max_length=200, help_text="The model name the server answers to.")
    api_key = models.CharField(max_length=200, blank=True, help_text="Sent as a bearer token; never shown.")
    capacity = models.PositiveIntegerField(default=64, help_text="Rollouts it takes at once.")
    max_model_len = models.PositiveIntegerField(help_text="Tokens of context, prompt and reply together.")
    state = models.CharField(max_length=10, choices=Health.choices, default=Health.LIVE)
    capabilities: models.JSONField[Any, Any] = models.JSONField(default=dict, editable=False)
    last_probe_at = models.DateTimeField(null=True, editable=False)
    last_error = models.CharField(max_length=300, blank=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar = ["policy__name", "url"]
        verbose_name = "LLM server"
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["project", "url", "model"], name="llm_server_once"),
            models.CheckConstraint(condition=models.Q(capacity__gte=1), name="llm_server_has_capacity"),
        ]

    def __str__(self) -> str:
        return f"{self.model} at {self.url}"
