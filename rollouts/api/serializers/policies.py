"""Policies and their versions."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from rollouts.api.serializers.registry import LLMServerSerializer
from rollouts.models import Policy, PolicyVersion


class PolicySerializer(serializers.ModelSerializer[Policy]):
    class Meta:
        model = Policy
        fields = ["id", "name", "version", "created_at"]
        read_only_fields = fields


class ServerReportSerializer(serializers.Serializer[Any]):
    """What became of an announcement on one server."""

    state = serializers.CharField(help_text="waiting, loading, ready, live or failed")
    error = serializers.CharField(required=False, help_text="Why it failed. The server takes no calls until a version loads.")
    seconds = serializers.FloatField(required=False, allow_null=True, help_text="From the first hold to the loaded weights.")


class PolicyVersionSerializer(serializers.ModelSerializer[PolicyVersion]):
    """`failed`: no server has it, and the policy's version is what it was. `ready`: the trainer may put weights in place."""

    policy = serializers.CharField(source="policy.name", read_only=True)
    report = serializers.DictField(child=ServerReportSerializer(), read_only=True, help_text="By the id of the server.")

    class Meta:
        model = PolicyVersion
        fields = ["id", "policy", "version", "mode", "source", "state", "report", "announced_at", "begun_at", "finished_at"]
        read_only_fields = fields


class PolicyDetailSerializer(PolicySerializer):
    """Wants `servers` and `announcement` in its context."""

    servers = serializers.SerializerMethodField()
    announcement = serializers.SerializerMethodField(help_text="The newest one; null when there was none.")

    class Meta(PolicySerializer.Meta):
        fields = [*PolicySerializer.Meta.fields, "servers", "announcement"]
        read_only_fields = fields

    def get_servers(self, policy: Policy) -> list[Any]:
        return list(LLMServerSerializer(self.context["servers"], many=True).data)

    def get_announcement(self, policy: Policy) -> Any:
        newest = self.context["announcement"]
        return None if newest is None else PolicyVersionSerializer(newest).data
