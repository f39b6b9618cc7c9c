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
    """A named model under training. `version` is the newest version that any of its servers has loaded."""

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

    class Engine(models.TextChoices):
        VLLM = "vllm", "vLLM"
        SGLANG = "sglang", "SGLang"
        OPENAI = "openai", "another that speaks the OpenAI API"

    class Admission(models.TextChoices):
        """What somebody asked for."""

        OPEN = "open", "open: takes part"
        DRAINING = "draining", "draining: keeps its rollouts and gets no new ones"
        PAUSED = "paused", "paused: takes no calls"
        ASLEEP = "asleep", "asleep: its memory is lent to training"

    class Health(models.TextChoices):
        """What was seen."""

        LIVE = "live", "live: gets rollouts"
        SUSPECT = "suspect", "suspect: a call or probe failed; gets nothing new until it answers"
        DEAD = "dead", "dead: did not answer several probes"
        RECOVERING = "recovering", "recovering: answers again; gets work slowly at first"

    class Hold(models.TextChoices):
        """What a weight update asks of those who call it."""

        NONE = "", "no weight update"
        WAIT = "wait", "begin no calls"
        CUT = "cut", "begin no calls and cut those in flight"

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
    engine = models.CharField(max_length=10, choices=Engine.choices, default=Engine.VLLM)
    tokenizer = models.CharField(
        max_length=500,
        blank=True,
        help_text="Directory of the model's tokenizer files on the workers; empty: the server renders.",
    )
    tool_format = models.CharField(max_length=30, blank=True, help_text="How the model writes tool calls; empty: hermes.")
    admission = models.CharField(max_length=10, choices=Admission.choices, default=Admission.OPEN)
    health = models.CharField(max_length=10, choices=Health.choices, default=Health.LIVE, editable=False)
    health_since = models.DateTimeField(default=timezone.now, editable=False)
    failures = models.PositiveIntegerField(default=0, editable=False, help_text="Probes and calls failed in a row.")
    hold = models.CharField(max_length=4, choices=Hold.choices, blank=True, default=Hold.NONE, editable=False)
    weights_unknown = models.BooleanField(
        default=False, db_default=False, editable=False, help_text="A weight update failed on it; it is paused for that."
    )
    capabilities: models.JSONField[Any, Any] = models.JSONField(default=dict, editable=False)
    load: models.JSONField[Any, Any] = models.JSONField(default=dict, editable=False, help_text="Its last metrics.")
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

    @property
    def state(self) -> str:
        """One word for both: what was asked for unless it is open, else how it is."""
        return self.health if self.admission == self.Admission.OPEN else self.admission


class PolicyVersion(models.Model):
    """One announcement of new weights, and what became of it on every server of the policy."""

    class Mode(models.TextChoices):
        """What happens to calls in flight."""

        DRAIN = "drain", "drain: they finish on the old weights"
        CONTINUE = "continue", "continue: they go on with the new weights"
        ABORT = "abort", "abort: they are cut and resumed from their ids with the new weights"

    class State(models.TextChoices):
        ANNOUNCED = "announced", "announced"
        LOADING = "loading", "loading"
        READY = "ready", "ready: its servers take no calls; the trainer may update them"
        LIVE = "live", "live"
        FAILED = "failed", "failed: no server has it"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    policy = models.ForeignKey(Policy, models.CASCADE, related_name="versions")
    version = models.PositiveIntegerField()
    mode = models.CharField(max_length=10, choices=Mode.choices, default=Mode.DRAIN)
    source: models.JSONField[Any, Any] = models.JSONField(default=dict, help_text="Where servers get the weights from.")
    state = models.CharField(max_length=10, choices=State.choices, default=State.ANNOUNCED)
    report: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="Of each server: its state, error and seconds."
    )
    announced_at = models.DateTimeField(default=timezone.now)
    begun_at = models.DateTimeField(null=True, help_text="When it was no longer behind an earlier one.")
    finished_at = models.DateTimeField(null=True)

    class Meta:
        ordering: ClassVar = ["-version"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["policy", "version"], name="policy_version_once")]

    def __str__(self) -> str:
        return f"{self.policy} v{self.version}"
