"""Sessions of agents outside any sandbox, told from their rollouts."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from rollouts.api.serializers.runs import RolloutSerializer
from rollouts.lifecycle import State
from rollouts.models import Rollout
from rollouts.services.sessions import base_urls, heartbeat_seconds


class SessionSerializer(serializers.ModelSerializer[Rollout]):
    """`id` is that of the session's rollout, where its trajectory, rewards and history are."""

    open = serializers.SerializerMethodField(help_text="Whether it takes calls.")
    state = serializers.CharField(read_only=True, help_text="Of the rollout.")
    task_key = serializers.CharField(source="task.key", read_only=True)
    environment = serializers.CharField(source="environment.name", read_only=True)
    termination = serializers.SerializerMethodField()
    opened_by = serializers.CharField(source="session.opened_by", read_only=True)
    key_prefix = serializers.SerializerMethodField(help_text="How its key begins.")
    metadata = serializers.DictField(source="session.metadata", read_only=True)
    ttl_seconds = serializers.IntegerField(
        source="session.ttl_seconds", read_only=True, help_text="How long the agent may be silent."
    )
    heartbeat_seconds = serializers.SerializerMethodField(help_text="How often to send a heartbeat when no call is made.")
    expires_at = serializers.DateTimeField(source="session.expires_at", read_only=True)
    last_seen_at = serializers.DateTimeField(source="session.last_seen_at", read_only=True)
    last_call_at = serializers.DateTimeField(source="session.last_call_at", read_only=True, allow_null=True)

    class Meta:
        model = Rollout
        fields = [
            *("id", "run", "group", "task", "task_key", "environment", "open", "state", "termination", "reward", "trainable"),
            *("turns", "prompt_tokens", "sampled_tokens", "policy_version", "fidelity", "opened_by", "key_prefix", "metadata"),
            *("ttl_seconds", "heartbeat_seconds", "expires_at", "last_seen_at", "last_call_at", "created_at", "finished_at"),
        ]
        read_only_fields = fields

    def get_open(self, rollout: Rollout) -> bool:
        return rollout.state == State.RUNNING.value

    def get_key_prefix(self, rollout: Rollout) -> str:
        return rollout.session.key_prefix

    def get_heartbeat_seconds(self, rollout: Rollout) -> float:
        return heartbeat_seconds(rollout.session)

    get_termination = RolloutSerializer.get_termination


class BaseUrlsSerializer(serializers.Serializer[Any]):
    openai = serializers.CharField(read_only=True, help_text="Of clients of the OpenAI API; ends with /v1.")
    anthropic = serializers.CharField(read_only=True)
    google = serializers.CharField(read_only=True)


class OpenedSessionSerializer(SessionSerializer):
    """Wants `key` in its context."""

    key = serializers.SerializerMethodField(help_text="The API key of the agent's client. Never shown again.")
    base_urls = serializers.SerializerMethodField(help_text="Where to point the agent's client.")

    class Meta(SessionSerializer.Meta):
        fields = [*SessionSerializer.Meta.fields, "key", "base_urls"]
        read_only_fields = fields

    def get_key(self, rollout: Rollout) -> str:
        return str(self.context["key"])

    @extend_schema_field(BaseUrlsSerializer)
    def get_base_urls(self, rollout: Rollout) -> dict[str, str]:
        return base_urls()
