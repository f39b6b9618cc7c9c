"""What a run or a project may use, and what it has used."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from rollouts.lifecycle import Limit
from rollouts.models import Project
from rollouts.models.limits import Limits

LIMITED_FIELDS = ["limits", "usage", "exhausted_at", "exhausted_by"]


class LimitsSerializer(serializers.ModelSerializer[Limits]):
    """Null is no limit."""

    class Meta:
        model = Project  # any of the two models that have these columns
        fields = [limit.value for limit in Limit]
        read_only_fields = fields


class UsageSerializer(serializers.Serializer[Limits]):
    """Tokens and sandbox seconds are those of finished rollouts; what is in flight is added when budgets are checked."""

    rollouts = serializers.IntegerField(source="used_rollouts", read_only=True, help_text="Accepted so far.")
    unfinished = serializers.SerializerMethodField(help_text="Of these, not finished, up to about a second ago.")
    tokens = serializers.IntegerField(source="used_tokens", read_only=True)
    sandbox_seconds = serializers.FloatField(source="used_sandbox_seconds", read_only=True)
    wall_seconds = serializers.SerializerMethodField(help_text="Since it was created.")

    def get_unfinished(self, owner: Limits) -> int:
        return int(owner.use[Limit.MAX_QUEUED])

    def get_wall_seconds(self, owner: Limits) -> float:
        return round(owner.use[Limit.MAX_WALL_SECONDS], 3)


class LimitedSerializer(serializers.Serializer[Any]):
    """What runs and projects have in common."""

    limits = LimitsSerializer(source="*", read_only=True)
    usage = UsageSerializer(source="*", read_only=True)
    exhausted_by = serializers.SerializerMethodField(help_text="The limit of the budget that ran out; null while none has.")

    @extend_schema_field(serializers.CharField(allow_null=True))
    def get_exhausted_by(self, owner: Limits) -> str | None:
        return owner.exhausted_by or None


class ProjectSerializer(LimitedSerializer, serializers.ModelSerializer[Project]):
    class Meta:
        model = Project
        fields = ["id", "name", "created_at", *LIMITED_FIELDS]
        read_only_fields = fields
