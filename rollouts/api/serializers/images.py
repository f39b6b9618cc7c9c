"""Images and their builds."""

from __future__ import annotations

from rest_framework import serializers

from sandboxes.models import Image, ImageBuild


class ImageSerializer(serializers.ModelSerializer[Image]):
    """A root file system that environments name."""

    state = serializers.CharField(read_only=True, help_text="pending, building, ready or failed")

    class Meta:
        model = Image
        fields = ["name", "kind", "format", "description", "state", "digest", "size", "warm_target"]
        fields += ["built_at", "last_used_at", "verified_at", "verify_problem", "created_at"]
        read_only_fields = fields


class ImageBuildSerializer(serializers.ModelSerializer[ImageBuild]):
    """One build, through all its tries."""

    state = serializers.CharField(read_only=True, help_text="queued, running, succeeded, failed or cancelled")
    progress = serializers.FloatField(read_only=True, help_text="0 to 1.")
    log = serializers.CharField(source="log_tail", read_only=True, help_text="The end of its log.")

    class Meta:
        model = ImageBuild
        fields = ["number", "state", "force", "tries", "node", "step", "progress", "error", "digest"]
        fields += ["created_at", "started_at", "finished_at", "log"]
        read_only_fields = fields


class ImageDetailSerializer(ImageSerializer):
    """With what it is made from, and its newest builds."""

    env = serializers.JSONField(read_only=True, help_text="Environment variables that it sets in its sandboxes.")
    builds = ImageBuildSerializer(many=True, read_only=True)

    class Meta(ImageSerializer.Meta):
        fields = [*ImageSerializer.Meta.fields, "source", "env", "builds"]
        read_only_fields = fields
