"""Trajectories and results.

Token arrays are large, so these are built as plain values; the serializer classes only describe them in the schema.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.urls import reverse
from rest_framework import serializers

from rollouts.api.cursors import position_cursor
from rollouts.api.serializers.runs import RolloutSerializer
from rollouts.api.serializers.segments import (
    PackedSegmentSerializer,
    PlacedPictureSerializer,
    SegmentSerializer,
    places_json,
    segment_json,
)
from rollouts.llm.types import PlacedPicture
from rollouts.models import MessagePicture, ModelCall, Rollout, ToolCall, ToolPicture
from rollouts.selectors.results import position_of
from rollouts.selectors.trajectory import Trajectory

_PROBLEM_HELP = "Why the stored tokens cannot be what was sent and sampled, and are withheld; empty when they can."


class MessagePictureSerializer(serializers.Serializer[Any]):
    """A picture that the model was shown in a message."""

    index = serializers.IntegerField(help_text="Place in its message.")
    mime = serializers.CharField()
    size = serializers.IntegerField(help_text="Bytes.")
    sha256 = serializers.CharField()
    url = serializers.CharField(help_text="Path of its data.")


class MessageSerializer(serializers.Serializer[Any]):
    index = serializers.IntegerField()
    turn = serializers.IntegerField()
    role = serializers.CharField()
    name = serializers.CharField(help_text="The tool, for role `tool`.")
    content = serializers.CharField()
    pictures = MessagePictureSerializer(many=True)


class ModelCallSerializer(serializers.Serializer[Any]):
    turn = serializers.IntegerField()
    segment = serializers.IntegerField()
    prompt_ids = serializers.ListField(child=serializers.IntegerField(), required=False, help_text="Only with `tokens=full`.")
    sampled_ids = serializers.ListField(child=serializers.IntegerField(), help_text="Empty when the server gave no ids.")
    logprobs = serializers.ListField(
        child=serializers.FloatField(), allow_null=True, help_text="One for each sampled id, or null."
    )
    text = serializers.CharField()
    finish_reason = serializers.CharField()
    prompt_tokens = serializers.IntegerField()
    pictures = PlacedPictureSerializer(
        many=True, help_text="Those new to its segment; offsets count from its prompt's first id."
    )
    policy = serializers.CharField()
    policy_version = serializers.IntegerField(help_text="Of the first sampled id.")
    policy_version_last = serializers.IntegerField(help_text="Of the last sampled id.")
    version_spans = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField(), min_length=2, max_length=2),
        help_text="[policy version, ids] pairs that cover the sampled ids in order.",
    )
    opened_by = serializers.CharField(help_text="Of the first call of a segment: why it was begun; else empty.")
    parent_segment = serializers.IntegerField(allow_null=True, help_text="Which segment its own branched off.")
    dialect = serializers.CharField(help_text="How an agent asked for it through the gateway; empty for the shipped loop.")
    server = serializers.UUIDField(allow_null=True)
    sampling = serializers.JSONField()
    latency = serializers.FloatField(help_text="Seconds.")
    at = serializers.DateTimeField()


class ToolPictureSerializer(serializers.Serializer[Any]):
    """A picture that a call displayed; its data is at `turns/{turn}/calls/{call}/pictures/{index}/` of its rollout."""

    index = serializers.IntegerField(help_text="Place in its call.")
    mime = serializers.CharField(help_text="What the sandbox called it; do not trust it.")
    size = serializers.IntegerField(help_text="Bytes.")
    sha256 = serializers.CharField()


class ToolCallSerializer(serializers.Serializer[Any]):
    turn = serializers.IntegerField()
    index = serializers.IntegerField()
    name = serializers.CharField()
    arguments = serializers.JSONField()
    raw = serializers.CharField(help_text="As sampled.")
    output = serializers.CharField()
    exit_code = serializers.IntegerField(allow_null=True)
    timed_out = serializers.BooleanField()
    truncated_bytes = serializers.IntegerField()
    error = serializers.CharField(help_text="Why nothing was done.")
    note = serializers.CharField(help_text="The tool's word about what was done.")
    running = serializers.BooleanField(help_text="The command went on.")
    limit_exceeded = serializers.CharField(help_text="The sandbox's limit for which it was ended, such as `memory_mb`.")
    pictures = ToolPictureSerializer(many=True)
    started_at = serializers.DateTimeField()
    duration = serializers.FloatField(help_text="Seconds.")


class TrajectorySerializer(serializers.Serializer[Any]):
    """The newest attempt. `segments` is empty for text-only trajectories, and where there is a `token_problem`."""

    rollout = serializers.UUIDField()
    attempt = serializers.IntegerField()
    fidelity = serializers.CharField(help_text="token-exact, segmented or text-only; empty before it has run")
    messages = MessageSerializer(many=True)
    model_calls = ModelCallSerializer(many=True)
    tool_calls = ToolCallSerializer(many=True)
    segments = SegmentSerializer(many=True)
    token_problem = serializers.CharField(help_text=_PROBLEM_HELP)


class ResultSerializer(RolloutSerializer):
    """Wants `rewards` (by rollout id) in its context."""

    cursor = serializers.SerializerMethodField(help_text="Its place in the stream: `after` this, the next ones follow.")
    rewards = serializers.SerializerMethodField(help_text="The newest version's components.")
    segments = PackedSegmentSerializer(many=True, read_only=True, required=False, help_text="Only with `include=segments`.")
    token_problem = serializers.CharField(read_only=True, required=False, help_text=f"With `segments`. {_PROBLEM_HELP}")
    trajectory = TrajectorySerializer(read_only=True, required=False, help_text="Only with `include=trajectory`.")

    class Meta(RolloutSerializer.Meta):
        fields = ["cursor", *RolloutSerializer.Meta.fields, "rewards", "segments", "token_problem", "trajectory"]
        read_only_fields = fields

    def get_cursor(self, rollout: Rollout) -> str:
        return position_cursor(position_of(rollout))

    def get_rewards(self, rollout: Rollout) -> dict[str, float | None]:
        return dict(self.context["rewards"][rollout.id])


class ResultsSerializer(serializers.Serializer[Any]):
    results = ResultSerializer(many=True)
    next = serializers.CharField(help_text="Cursor for the next request's `after`.")
    done = serializers.BooleanField(help_text="All rollouts of the run have ended and were delivered up to here.")


def trajectory_json(trajectory: Trajectory, *, full_prompts: bool = False) -> dict[str, Any]:
    """As `TrajectorySerializer` describes it."""
    calls = [_model_call(call) for call in trajectory.model_calls]
    displayed: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for one in trajectory.tool_pictures:
        displayed[one.turn, one.call].append(_picture(one))
    seen: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for picture in trajectory.message_pictures:
        seen[picture.message].append({**_picture(picture), "url": _path_of(picture)})
    began = {call.segment: call for call in reversed(trajectory.model_calls)}
    if full_prompts and not trajectory.token_problem:
        for call, exchange in zip(calls, trajectory.exchanges(), strict=True):
            call["prompt_ids"] = exchange.prompt_ids
    return {
        "rollout": str(trajectory.rollout.id),
        "attempt": trajectory.rollout.attempt,
        "fidelity": trajectory.rollout.fidelity,
        "messages": [
            {
                **{"index": m.index, "turn": m.turn, "role": m.role, "name": m.name, "content": m.content},
                "pictures": seen[m.index],
            }
            for m in trajectory.messages
        ],
        "model_calls": calls,
        "tool_calls": [_tool_call(call, displayed[call.turn, call.index]) for call in trajectory.tool_calls],
        "segments": [segment_json(segment, began[number]) for number, segment in enumerate(trajectory.segments())],
        "token_problem": trajectory.token_problem,
    }


def _model_call(call: ModelCall) -> dict[str, Any]:
    before = call.prompt_tokens - len(call.context_ids)
    return {
        "turn": call.turn,
        "segment": call.segment,
        "sampled_ids": call.sampled_ids,
        "logprobs": call.logprobs,
        "text": call.text,
        "finish_reason": call.finish_reason,
        "prompt_tokens": call.prompt_tokens,
        "pictures": places_json(PlacedPicture(before + offset, length, digest) for offset, length, digest in call.placed),
        "policy": call.policy,
        "policy_version": call.policy_version,
        "policy_version_last": call.policy_version if call.policy_version_last is None else call.policy_version_last,
        "version_spans": call.version_spans or [[call.policy_version, len(call.sampled_ids)]],
        "opened_by": call.opened_by,
        "parent_segment": call.parent_segment,
        "dialect": call.dialect,
        "server": call.server_id,
        "sampling": call.sampling,
        "latency": call.latency,
        "at": call.at,
    }


def _picture(picture: ToolPicture | MessagePicture) -> dict[str, Any]:
    return {"index": picture.index, "mime": picture.mime, "size": picture.blob.size, "sha256": picture.blob_id}


def _path_of(picture: MessagePicture) -> str:
    return reverse("api-picture", args=[picture.rollout_id, picture.blob_id])


def _tool_call(call: ToolCall, pictures: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "turn": call.turn,
        "index": call.index,
        "name": call.name,
        "arguments": call.arguments,
        "raw": call.raw,
        "output": call.output,
        "exit_code": call.exit_code,
        "timed_out": call.timed_out,
        "truncated_bytes": call.truncated_bytes,
        "error": call.error,
        "note": call.note,
        "running": call.running,
        "limit_exceeded": call.limit_exceeded,
        "pictures": pictures,
        "started_at": call.started_at,
        "duration": call.duration,
    }
