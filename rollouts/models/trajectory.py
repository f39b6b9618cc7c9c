"""What happened inside a rollout: messages, model calls with their tokens, tool calls, rewards. All rows carry the attempt."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils import timezone

from rollouts.llm.pictures import PICTURE_TYPES
from rollouts.llm.types import SegmentCause

from .blob import Blob
from .fields import LogprobsField, TokenIdsField, choices
from .rollout import Rollout


class Message(models.Model):
    """One message of the conversation, in order."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="messages")
    attempt = models.PositiveIntegerField()
    index = models.PositiveIntegerField()
    turn = models.PositiveIntegerField()
    role = models.CharField(max_length=10)
    name = models.CharField(max_length=60, blank=True)
    content = models.TextField(blank=True)

    class Meta:
        ordering: ClassVar = ["index"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["rollout", "attempt", "index"], name="message_index_once")]

    def __str__(self) -> str:
        return f"{self.role} #{self.index}"


class StoredPicture(models.Model):
    """A picture whose data is a blob, of the type that whoever brought it calls it."""

    mime = models.CharField(max_length=40)
    blob = models.ForeignKey(Blob, models.PROTECT, related_name="+")

    class Meta:
        abstract = True

    @property
    def is_shown(self) -> bool:
        """Whether pages show it. SVG is not: it is a document that can run scripts."""
        return self.mime in PICTURE_TYPES


class MessagePicture(StoredPicture):
    """A picture in a message, where the model saw it."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="message_pictures")
    attempt = models.PositiveIntegerField()
    message = models.PositiveIntegerField(help_text="The message's index.")
    index = models.PositiveIntegerField(help_text="Place in its message.")

    class Meta:
        ordering: ClassVar = ["message", "index"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["rollout", "attempt", "message", "index"], name="message_picture_place_once"),
        ]

    def __str__(self) -> str:
        return f"picture {self.index} of message {self.message}"


class ModelCall(models.Model):
    """One model call. Its prompt ids are those of the earlier calls of its segment, then `context_ids` (see llm/buffer.py)."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="model_calls")
    attempt = models.PositiveIntegerField()
    turn = models.PositiveIntegerField()
    segment = models.PositiveIntegerField(default=0)
    context_ids = TokenIdsField()
    sampled_ids = TokenIdsField()
    logprobs = LogprobsField(null=True)
    text = models.TextField(blank=True)
    finish_reason = models.CharField(max_length=20)
    prompt_tokens = models.PositiveIntegerField()
    policy = models.CharField(max_length=100)
    policy_version = models.PositiveIntegerField(help_text="Of the first sampled id.")
    policy_version_last = models.PositiveIntegerField(null=True, help_text="Of the last sampled id; null: the same.")
    version_spans: models.JSONField[Any, Any] = models.JSONField(
        default=list,
        db_default=[],
        help_text="[version, ids] pairs in order; empty when there is one version, or the pairs are not known.",
    )
    opened_by = models.CharField(
        max_length=10, blank=True, default="", db_default="", choices=choices(SegmentCause), help_text="Why its segment began."
    )
    parent_segment = models.PositiveIntegerField(null=True, help_text="Which segment its own branched off.")
    dialect = models.CharField(
        max_length=20, blank=True, default="", db_default="", help_text="How an agent asked for it through the gateway."
    )
    conversation_key = models.CharField(
        max_length=100, blank=True, default="", db_default="", help_text="By which the gateway finds what goes on from here."
    )
    placed: models.JSONField[Any, Any] = models.JSONField(
        default=list,
        db_default=[],
        help_text="[offset, length, SHA-256] of each picture among `context_ids`; its data is that of a message's picture.",
    )
    server_id = models.UUIDField(null=True)
    sampling: models.JSONField[Any, Any] = models.JSONField(default=dict)
    latency = models.FloatField(help_text="Seconds.")
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["turn"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["rollout", "attempt", "turn"], name="model_call_turn_once")]

    def __str__(self) -> str:
        return f"call {self.turn} of {self.rollout_id}"


class ToolCall(models.Model):
    """One tool call and what came of it."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="tool_calls")
    attempt = models.PositiveIntegerField()
    turn = models.PositiveIntegerField()
    index = models.PositiveIntegerField(help_text="Place in its turn.")
    name = models.CharField(max_length=60)
    arguments: models.JSONField[Any, Any] = models.JSONField(default=dict)
    raw = models.TextField(blank=True, help_text="As sampled.")
    output = models.TextField(blank=True)
    output_blob = models.ForeignKey(
        Blob,
        models.PROTECT,
        null=True,
        related_name="+",
        db_index=False,
        help_text="All of the output, when `output` is only an excerpt to look at.",
    )
    exit_code = models.IntegerField(null=True)
    timed_out = models.BooleanField(default=False)
    truncated_bytes = models.PositiveBigIntegerField(default=0)
    error = models.TextField(blank=True)
    note = models.TextField(blank=True, default="", db_default="", help_text="The tool's word about what was done.")
    running = models.BooleanField(default=False, db_default=False, help_text="The command went on.")
    limit_exceeded = models.CharField(
        max_length=30, blank=True, default="", db_default="", help_text="The sandbox's limit for which it was ended."
    )
    started_at = models.DateTimeField()
    duration = models.FloatField(help_text="Seconds.")

    class Meta:
        ordering: ClassVar = ["turn", "index"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["rollout", "attempt", "turn", "index"], name="tool_call_place_once"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["output_blob"], name="tool_call_blob", condition=models.Q(output_blob__isnull=False))
        ]

    def __str__(self) -> str:
        return f"{self.name} in turn {self.turn}"


class ToolPicture(StoredPicture):
    """A picture that a tool call displayed."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="tool_pictures")
    attempt = models.PositiveIntegerField()
    turn = models.PositiveIntegerField()
    call = models.PositiveIntegerField(help_text="The call's place in its turn.")
    index = models.PositiveIntegerField(help_text="Place in its call.")

    class Meta:
        ordering: ClassVar = ["turn", "call", "index"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["rollout", "attempt", "turn", "call", "index"], name="tool_picture_place_once"),
        ]

    def __str__(self) -> str:
        return f"picture {self.index} of call {self.call} in turn {self.turn}"


class Reward(models.Model):
    """One named component of one scoring of a rollout. Re-scoring adds rows under the next version and keeps the old ones."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="rewards")
    version = models.PositiveIntegerField(default=1)
    name = models.CharField(max_length=60)
    value = models.FloatField(null=True)
    weight = models.FloatField(default=1.0)
    detail: models.JSONField[Any, Any] = models.JSONField(default=dict)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["version", "id"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["rollout", "version", "name"], name="reward_component_once")]

    def __str__(self) -> str:
        return f"{self.name} = {self.value}"
