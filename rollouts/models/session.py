"""Agents outside any sandbox: each of their sessions is a rollout that the agent itself carries out."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils import timezone

from .project import Project
from .rollout import Rollout

KEY_PREFIX = "prs"


class Session(models.Model):
    """What a session has beyond its rollout: its key, its agent's signs of life, and its place in the gateway.

    It is open as long as the rollout is RUNNING. The rollout's lease is held by one gateway process at a time.
    """

    rollout = models.OneToOneField(Rollout, models.CASCADE, primary_key=True, related_name="session")
    project = models.ForeignKey(Project, models.CASCADE, related_name="sessions", db_index=False)
    opened_by = models.CharField(max_length=200, help_text="The API key or person that opened it.")
    metadata: models.JSONField[Any, Any] = models.JSONField(default=dict, help_text="The opener's own.")
    key_id = models.CharField(max_length=12, unique=True, editable=False, help_text="The public part of its key.")
    key_sha256 = models.CharField(max_length=64, editable=False)
    ttl_seconds = models.PositiveIntegerField(help_text="How long its agent may be silent.")
    expires_at = models.DateTimeField(help_text="Put off by every call and heartbeat.")
    last_seen_at = models.DateTimeField(default=timezone.now)
    last_call_at = models.DateTimeField(null=True)
    reward: models.JSONField[Any, Any] = models.JSONField(
        null=True, help_text="Components given before it is closed, which then count."
    )
    taken_at = models.DateTimeField(null=True, help_text="Since when its gateway process serves it; null: any may take it.")
    wanted_at = models.DateTimeField(null=True, help_text="Another gateway process has asked for it.")

    class Meta:
        ordering: ClassVar = ["-rollout_id"]
        indexes: ClassVar = [models.Index(fields=["project", "-rollout"], name="session_list")]

    def __str__(self) -> str:
        return str(self.rollout_id)

    @property
    def key_prefix(self) -> str:
        """How its key begins: what may be shown of it."""
        return f"{KEY_PREFIX}_{self.key_id}"
