"""What trainers train on: segments, as numbers or packed, and the pictures among their ids."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from rest_framework import serializers

from rollouts.llm.buffer import Segment
from rollouts.llm.types import PlacedPicture
from rollouts.models import ModelCall
from rollouts.selectors.segments import PackedSegment


class PlacedPictureSerializer(serializers.Serializer[Any]):
    """A picture among ids, none of which was sampled: the model sees it in place of `length` ids from `offset` on."""

    offset = serializers.IntegerField()
    length = serializers.IntegerField()
    sha256 = serializers.CharField(help_text="Its data is at `pictures/{sha256}/` of its rollout.")


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


def segment_json(segment: Segment, first: ModelCall) -> dict[str, Any]:
    """As `SegmentSerializer` describes it; `first` is its first call."""
    return {
        "opened_by": first.opened_by,
        "parent_segment": first.parent_segment,
        "pictures": places_json(segment.placed),
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
        "pictures": places_json(segment.placed),
        "token_ids": segment.token_ids,
        "loss_mask": segment.loss_mask,
        "logprobs": segment.logprobs,
        "version_runs": segment.version_runs,
    }


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def places_json(placed: Iterable[PlacedPicture]) -> list[dict[str, Any]]:
    """As `PlacedPictureSerializer` describes them."""
    return [{"offset": place.offset, "length": place.length, "sha256": place.digest} for place in placed]
