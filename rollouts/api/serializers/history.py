"""Attempts with their failures, and rescorings."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from rollouts.api.serializers.runs import AttemptSerializer
from rollouts.models import Attempt, Rescoring, StageFailure


class StageFailureSerializer(serializers.ModelSerializer[StageFailure]):
    stage = serializers.CharField(read_only=True, help_text="init, run or eval")
    worker = serializers.UUIDField(read_only=True, allow_null=True, help_text="The worker process that held it, if any.")
    cause = serializers.CharField(read_only=True)
    blame = serializers.CharField(read_only=True)
    retried_as = serializers.CharField(read_only=True, help_text="requeued, eval_again or gave_up")

    class Meta:
        model = StageFailure
        fields = ["stage", "at", "worker", "node", "pid", "cause", "blame", "detail", "traceback", "retried_as"]
        read_only_fields = fields


class AttemptHistorySerializer(AttemptSerializer):
    """Wants `failures` (by attempt number) in its context."""

    failures = serializers.SerializerMethodField(help_text="What failed in it, oldest first.")

    class Meta(AttemptSerializer.Meta):
        fields = [*AttemptSerializer.Meta.fields, "failures"]
        read_only_fields = fields

    @extend_schema_field(StageFailureSerializer(many=True))
    def get_failures(self, attempt: Attempt) -> Any:
        return StageFailureSerializer(self.context["failures"][attempt.number], many=True).data


class AttemptsSerializer(serializers.Serializer[Any]):
    attempts = AttemptHistorySerializer(many=True, read_only=True, help_text="Oldest first.")


class RescoringSerializer(serializers.ModelSerializer[Rescoring]):
    rollout = serializers.UUIDField(source="rollout_id", read_only=True)
    environment = serializers.CharField(source="environment.name", read_only=True)
    environment_version = serializers.IntegerField(source="environment.version", read_only=True)
    state = serializers.CharField(read_only=True, help_text="queued, running, done or failed")
    cause = serializers.CharField(read_only=True, help_text="Of the last failure; empty when there was none.")

    class Meta:
        model = Rescoring
        fields = [
            "id",
            "rollout",
            "environment",
            "environment_version",
            "state",
            "tries",
            "requested_at",
            "finished_at",
            "reward_version",
            "reward_before",
            "reward",
            "cause",
            "detail",
            "traceback",
        ]
        read_only_fields = fields


class RequestedSerializer(serializers.Serializer[Any]):
    queued = serializers.IntegerField(read_only=True, help_text="Rollouts that will be scored again.")
    going_on = serializers.IntegerField(read_only=True, help_text="Rollouts for which an earlier request is not over.")
    left_out = serializers.IntegerField(
        read_only=True, help_text="Rollouts that cannot be scored: not ended, nothing to score, or pruned."
    )
