"""The trainer's view of many trajectories at once, in packed bytes that are never unpacked here.

The columns hold packed arrays already. Turning four million of them into Python numbers and then into decimal text takes half a
minute; joining the bytes takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.db.models import BinaryField, F
from django.db.models.functions import Cast

from rollouts.models import ModelCall, Rollout

_ITEM_BYTES = 4  # of a token id and of a logprob


@dataclass
class PackedSegment:
    """A `llm.buffer.Segment`, little-endian: int32 ids, one byte of mask each, float32 logprobs (None when one is unknown)."""

    token_ids: bytearray = field(default_factory=bytearray)
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: bytearray | None = field(default_factory=bytearray)

    def add(self, context: bytes, sampled: bytes, logprobs: bytes | None) -> None:
        self.token_ids += context + sampled
        self.loss_mask += b"\0" * (len(context) // _ITEM_BYTES) + b"\1" * (len(sampled) // _ITEM_BYTES)
        if self.logprobs is not None:
            self.logprobs += b"\0" * len(context) + (logprobs or b"")
        if logprobs is None:
            self.logprobs = None


def packed_segments(rollouts: Sequence[Rollout]) -> dict[UUID, list[PackedSegment]]:
    """The segments of each rollout's newest attempt, in one query; like `Trajectory.segments`, but packed."""
    found: dict[UUID, list[PackedSegment]] = {rollout.id: [] for rollout in rollouts}
    calls = ModelCall.objects.filter(rollout_id__in=list(found), attempt=F("rollout__attempt")).order_by("rollout_id", "turn")
    packed = (_raw(name) for name in ("context_ids", "sampled_ids", "logprobs"))
    for rollout_id, segment, context, sampled, logprobs in calls.values_list("rollout_id", "segment", *packed):
        segments = found[rollout_id]
        if segment == len(segments):
            segments.append(PackedSegment())
        segments[segment].add(bytes(context), bytes(sampled), None if logprobs is None else bytes(logprobs))
    return {id_: segments if any(1 in s.loss_mask for s in segments) else [] for id_, segments in found.items()}


def _raw(name: str) -> Any:
    return Cast(name, BinaryField())
