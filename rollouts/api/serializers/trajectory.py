"""Trajectories and results.

Token arrays are large, so these are built as plain values; the serializer classes below only describe them in the schema.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from django.urls import reverse
from rest_framework import serializers

from rollouts.api.cursors import position_cursor
from rollouts.api.serializers.runs import RolloutSerializer
from rollouts.llm.buffer import Segment
from rollouts.llm.types import PlacedPicture
from rollouts.models import MessagePicture, ModelCall, Rollout, ToolCall, ToolPicture
from rollouts.selectors.results import position_of
from rollouts.selectors.segments import PackedSegment
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


class PlacedPictureSerializer(serializers.Serializer[Any]):
    """A picture among ids, none of which was sampled: the model sees it in place of `length` ids from `offset` on."""

    offset = serializers.IntegerField()
    length = serializers.IntegerField()
    sha256 = serializers.CharField(help_text="Its data is at `pictures/{sha256}/` of its rollout.")


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


class _AnySegmentSerializer(serializers.Serializer[Any]):
    """What segments have, packed or not."""

    opened_by = serializers.CharField(help_text="Why it was begun; empty when that was not noted.")
    parent_segment = serializers.IntegerField(allow_null=True, help_text="Which segment it branched off.")
    pictures = PlacedPictureSerializer(many=True, help_text="Among its ids, in order.")


class SegmentSerializer(_AnySegmentSerializer):
    """One append-only sequence, ready to train on. The lists with a value for each id are of the same length."""

    token_ids = serializers.ListField(child=serializers.IntegerField())
    loss_mask = serializers.ListField(child=serializers.IntegerField(), help_text="1 on sampled ids, 0 elsewhere.")
    logprobs = serializers.ListField(
        child=serializers.FloatField(), allow_null=True, help_text="0.0 where the mask is 0; null when any is unknown."
    )
    policy_versions = serializers.ListField(
        child=serializers.IntegerField(), help_text="Which policy version sampled the id; -1 where the mask is 0."
    )


class PackedSegmentSerializer(_AnySegmentSerializer):
    """A segment as little-endian arrays, in base64 (JSON) or as they are (MessagePack): 9 to 12 bytes a token instead of 50."""

    token_ids = serializers.CharField(help_text="int32")
    loss_mask = serializers.CharField(help_text="uint8; 1 on sampled ids, 0 elsewhere")
    logprobs = serializers.CharField(allow_null=True, help_text="float32; 0.0 where the mask is 0; null when any is unknown")
    version_runs = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField(), min_length=2, max_length=2),
        help_text="[policy version, ids] pairs that cover all ids in order; -1 for those that were not sampled.",
    )


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
        "segments": [_segment(segment, began[number]) for number, segment in enumerate(trajectory.segments())],
        "token_problem": trajectory.token_problem,
    }


def _segment(segment: Segment, first: ModelCall) -> dict[str, Any]:
    return {
        "opened_by": first.opened_by,
        "parent_segment": first.parent_segment,
        "pictures": _places(segment.placed),
        "token_ids": segment.ids,
        "loss_mask": segment.mask,
        "logprobs": segment.logprobs,
        "policy_versions": segment.versions,
    }


def packed_segment_json(segment: PackedSegment) -> dict[str, Any]:
    """As `PackedSegmentSerializer` describes it."""
    return {
        **packed_segment_raw(segment),
        "token_ids": _base64(segment.token_ids),
        "loss_mask": _base64(segment.loss_mask),
        "logprobs": None if segment.logprobs is None else _base64(segment.logprobs),
    }


def packed_segment_raw(segment: PackedSegment) -> dict[str, Any]:
    """As `PackedSegmentSerializer` describes it, but the bytes themselves."""
    return {
        "opened_by": segment.opened_by,
        "parent_segment": segment.parent_segment,
        "pictures": _places(segment.placed),
        "token_ids": segment.token_ids,
        "loss_mask": segment.loss_mask,
        "logprobs": segment.logprobs,
        "version_runs": segment.version_runs,
    }


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _places(placed: Iterable[PlacedPicture]) -> list[dict[str, Any]]:
    return [{"offset": place.offset, "length": place.length, "sha256": place.digest} for place in placed]


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
        "pictures": _places(PlacedPicture(before + offset, length, digest) for offset, length, digest in call.placed),
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
