"""Environments, datasets, tasks, LLM servers."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from rollouts.llm.server_metrics import SHOWN
from rollouts.models import Dataset, Environment, LLMServer, Task


class EnvironmentSerializer(serializers.ModelSerializer[Environment]):
    class Meta:
        model = Environment
        fields = ["id", "name", "version", "handler", "config", "description", "created_at"]
        read_only_fields = fields


class EnvironmentDetailSerializer(EnvironmentSerializer):
    """With the JSON schemas of its handler; both are null on a server where the handler is not installed."""

    config_schema = serializers.JSONField(read_only=True)
    task_schema = serializers.JSONField(read_only=True)

    class Meta(EnvironmentSerializer.Meta):
        fields = [*EnvironmentSerializer.Meta.fields, "config_schema", "task_schema"]
        read_only_fields = fields


class DatasetSerializer(serializers.ModelSerializer[Dataset]):
    environment = serializers.CharField(source="environment.name", read_only=True)
    environment_id = serializers.UUIDField(read_only=True)
    environment_version = serializers.IntegerField(source="environment.version", read_only=True)

    class Meta:
        model = Dataset
        fields = ["id", "name", "environment", "environment_id", "environment_version", "created_at"]
        read_only_fields = fields


class DatasetDetailSerializer(DatasetSerializer):
    tasks = serializers.IntegerField(read_only=True)
    quarantined = serializers.IntegerField(read_only=True, help_text="Tasks that are never rolled out.")

    class Meta(DatasetSerializer.Meta):
        fields = [*DatasetSerializer.Meta.fields, "tasks", "quarantined"]
        read_only_fields = fields


class TaskSerializer(serializers.ModelSerializer[Task]):
    quarantined = serializers.SerializerMethodField(help_text="Cannot be scored and is never rolled out.")

    class Meta:
        model = Task
        fields = ["id", "key", "payload", "quarantined", "quarantine_reason", "created_at"]
        read_only_fields = fields

    def get_quarantined(self, task: Task) -> bool:
        return bool(task.quarantine_reason)


class StoredTaskSerializer(TaskSerializer):
    """A task as stored, without the payload that was just sent."""

    class Meta(TaskSerializer.Meta):
        fields = ["id", "key", "quarantined", "quarantine_reason"]
        read_only_fields = fields


class StoredTasksSerializer(serializers.Serializer[Any]):
    tasks = StoredTaskSerializer(many=True, read_only=True)


class LLMServerSerializer(serializers.ModelSerializer[LLMServer]):
    """Without its API key, which is never shown."""

    policy = serializers.CharField(source="policy.name", read_only=True)
    state = serializers.CharField(
        read_only=True,
        help_text="What was asked for unless that is to take part (draining, paused, asleep), else its health.",
    )
    features = serializers.SerializerMethodField(help_text="What a probe found that it offers.")
    load = serializers.SerializerMethodField(help_text="From its last metrics; a share is between 0 and 1.")
    in_flight = serializers.IntegerField(read_only=True, help_text="Rollouts that run on it.")
    has_api_key = serializers.SerializerMethodField()

    class Meta:
        model = LLMServer
        fields = [
            "id",
            "url",
            "model",
            "policy",
            "policy_version",
            "capacity",
            "max_model_len",
            "state",
            "admission",
            "health",
            "health_since",
            "failures",
            "engine",
            "features",
            "tokenizer",
            "tool_format",
            "in_flight",
            "load",
            "has_api_key",
            "capabilities",
            "last_probe_at",
            "last_error",
            "created_at",
        ]
        read_only_fields = fields

    def get_has_api_key(self, server: LLMServer) -> bool:
        return bool(server.api_key)

    def get_features(self, server: LLMServer) -> list[str]:
        return list(server.capabilities.get("features", ()))

    def get_load(self, server: LLMServer) -> dict[str, float]:
        return {name: value for name, value in server.load.items() if name in SHOWN}
