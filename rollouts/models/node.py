"""Worker hosts and the worker processes on them. A rollout's lease is its worker process's lease."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Any, ClassVar

from django.contrib.postgres.fields import ArrayField
from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

from rollouts.lifecycle import GATEWAY, Stage

from .fields import uuid7


def _cap(stage: Stage) -> models.PositiveIntegerField[int | None, int | None]:
    return models.PositiveIntegerField(
        null=True, blank=True, help_text=f"{stage.upper()} rollouts at once; empty: what its workers offer."
    )


class Draining(enum.Enum):
    """How far a node is with giving up its work."""

    NO = "no"
    FINISHING = "finishing"  # starts nothing, finishes what runs
    OVER = "over"  # the deadline is past: hands back what it still holds


class Node(models.Model):
    """A worker host. Its row comes with its first worker process and stays, so that its limits outlive restarts."""

    name = models.CharField(max_length=100, primary_key=True)
    max_init = _cap(Stage.INIT)
    max_run = _cap(Stage.RUN)
    max_eval = _cap(Stage.EVAL)
    ready_buffer = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Prewarmed rollouts kept for its RUN workers; empty: PRORL_READY_BUFFER.",
    )
    draining_since = models.DateTimeField(null=True, editable=False)
    drain_deadline = models.DateTimeField(null=True, editable=False, help_text="What it still holds then is handed back.")

    cpus = models.PositiveIntegerField(default=0, editable=False)
    memory = models.PositiveBigIntegerField(default=0, editable=False, help_text="Bytes.")
    booted_at = models.DateTimeField(null=True, editable=False)
    version = models.CharField(max_length=40, editable=False, help_text="Of this project, on the node.")
    sandbox_backend = models.CharField(max_length=20, default="", editable=False)
    sandbox_facts: models.JSONField[Any, Any] = models.JSONField(
        default=dict, editable=False, help_text="What its INIT workers found out: programs, versions, limit -> mechanism."
    )
    sandbox_problem = models.TextField(default="", editable=False, help_text="Why no sandbox can be started on it.")
    registered_at = models.DateTimeField(default=timezone.now, editable=False)
    last_seen_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            models.CheckConstraint(
                condition=models.Q(draining_since=None, drain_deadline=None)
                | models.Q(draining_since__isnull=False, drain_deadline__isnull=False),
                name="node_drains_to_a_deadline",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def draining(self, now: datetime) -> Draining:
        if self.drain_deadline is None:
            return Draining.NO
        return Draining.FINISHING if now < self.drain_deadline else Draining.OVER


class WorkerProcess(models.Model):
    """One worker process of one stage on one node, or a gateway process.

    It renews `lease_expires_at` every few seconds. Once that is past, the reaper sets `lost_at` and takes back everything the
    process held; a process that wakes up later finds itself lost and starts over under a new id.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    node = models.CharField(max_length=100)
    stage = models.CharField(max_length=10, choices=[(name, name) for name in (*(s.value for s in Stage), GATEWAY)])
    pid = models.PositiveIntegerField()
    concurrency = models.PositiveIntegerField(help_text="Rollouts it works on at once.")
    started_at = models.DateTimeField(default=timezone.now)
    lease_expires_at = models.DateTimeField()
    draining_since = models.DateTimeField(null=True, help_text="It was told to finish what it holds and then to stop.")
    stopped_at = models.DateTimeField(null=True, help_text="It said goodbye.")
    lost_at = models.DateTimeField(null=True, help_text="Its lease ran out.")
    quiet_servers: ArrayField[Any, Any] = ArrayField(
        models.UUIDField(), default=list, db_default=[], help_text="LLM servers under a hold where it has no call in flight."
    )

    class Meta:
        ordering: ClassVar = ["-started_at"]
        verbose_name_plural = "worker processes"
        indexes: ClassVar = [
            models.Index(fields=["stage", "node"], name="worker_live", condition=models.Q(stopped_at=None, lost_at=None)),
        ]

    def __str__(self) -> str:
        return f"{self.stage}@{self.node} pid {self.pid}"


class RescuerPass(models.Model):
    """One row: when the rescuer last got through, and until when it declares nobody lost (see `services.reap`)."""

    id = models.BooleanField(primary_key=True, default=True)
    at = models.DateTimeField(default=timezone.now)
    grace_until = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [models.CheckConstraint(condition=models.Q(id=True), name="rescuer_pass_is_one_row")]

    def __str__(self) -> str:
        return f"{self.at}"
