"""Webhook endpoints, and what was sent to them."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from rollouts.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint


class WebhookSerializer(serializers.ModelSerializer[WebhookEndpoint]):
    """Without its secret, which is shown once."""

    run = serializers.UUIDField(source="run_id", read_only=True, allow_null=True, help_text="Only events of this run.")
    event_types = serializers.ListField(child=serializers.CharField(), read_only=True)
    enabled = serializers.SerializerMethodField()
    failing_since = serializers.DateTimeField(
        read_only=True, allow_null=True, help_text="The first failed attempt since the last success."
    )

    class Meta:
        model = WebhookEndpoint
        fields = [
            "id",
            "url",
            "description",
            "event_types",
            "run",
            "enabled",
            "disabled_at",
            "disabled_reason",
            "failing_since",
            "created_at",
        ]
        read_only_fields = fields

    def get_enabled(self, endpoint: WebhookEndpoint) -> bool:
        return endpoint.disabled_at is None


class WebhookWithSecretSerializer(WebhookSerializer):
    """The answer that shows the secret, once."""

    secret = serializers.CharField(read_only=True, help_text="Verifies the signatures. Keep it: it is not shown again.")

    class Meta(WebhookSerializer.Meta):
        fields = [*WebhookSerializer.Meta.fields, "secret"]
        read_only_fields = fields


class WebhookAttemptSerializer(serializers.ModelSerializer[WebhookAttempt]):
    status = serializers.IntegerField(read_only=True, allow_null=True, help_text="Null when no answer came.")

    class Meta:
        model = WebhookAttempt
        fields = ["at", "duration", "status", "error", "response"]
        read_only_fields = fields


class WebhookDeliverySerializer(serializers.ModelSerializer[WebhookDelivery]):
    event_type = serializers.CharField(read_only=True)
    message_id = serializers.CharField(read_only=True, help_text="The `webhook-id` header of all its attempts.")
    payload = serializers.JSONField(read_only=True)
    state = serializers.CharField(read_only=True, help_text="pending, delivered or failed")
    next_attempt_at = serializers.SerializerMethodField(help_text="Null when there is none.")
    attempts = WebhookAttemptSerializer(many=True, read_only=True, help_text="Oldest first, replays included.")

    class Meta:
        model = WebhookDelivery
        fields = [
            "id",
            "event_type",
            "message_id",
            "payload",
            "state",
            "next_attempt_at",
            "settled_at",
            "created_at",
            "attempts",
        ]
        read_only_fields = fields

    def get_next_attempt_at(self, delivery: WebhookDelivery) -> str | None:
        pending = delivery.state == WebhookDelivery.State.PENDING
        return delivery.next_attempt_at.isoformat() if pending else None


class ReplayedSerializer(serializers.Serializer[Any]):
    replayed = serializers.IntegerField(read_only=True, help_text="Messages that will be sent again.")
