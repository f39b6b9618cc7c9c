"""The trainer's view of many trajectories at once, in packed bytes that are never unpacked here.

The columns hold packed arrays already. Turning four million of them into Python numbers and then into decimal text takes half a
minute; joining the bytes takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import psycopg
from django.db import connection

from rollouts.llm.buffer import NOT_SAMPLED
from rollouts.models import Rollout

_ITEM_BYTES = 4  # of a token id and of a logprob


@dataclass
class PackedSegment:
    """A `llm.buffer.Segment`, little-endian: int32 ids, one byte of mask each, float32 logprobs (None when one is unknown).

    `version_runs` are [policy version, ids] pairs that cover all ids in order, with -1 for those that were not sampled.
    """

    token_ids: bytearray = field(default_factory=bytearray)
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: bytearray | None = field(default_factory=bytearray)
    version_runs: list[list[int]] = field(default_factory=list)

    def add(self, context: bytes, sampled: bytes, logprobs: bytes | None, version: int, spans: list[list[int]]) -> None:
        self.token_ids += context
        self.token_ids += sampled
        self.loss_mask += b"\0" * (len(context) // _ITEM_BYTES)
        self.loss_mask += b"\1" * (len(sampled) // _ITEM_BYTES)
        if self.logprobs is not None:
            self.logprobs += b"\0" * len(context)
            self.logprobs += logprobs or b""
        if logprobs is None:
            self.logprobs = None
        self.version_runs.append([NOT_SAMPLED, len(context) // _ITEM_BYTES])
        self.version_runs += spans or [[version, len(sampled) // _ITEM_BYTES]]


_CALLS = """
SELECT call.rollout_id, call.segment, call.context_ids, call.sampled_ids, call.logprobs, call.policy_version, call.version_spans
FROM rollouts_modelcall call JOIN rollouts_rollout r ON r.id = call.rollout_id AND r.attempt = call.attempt
WHERE call.rollout_id = ANY(%s) ORDER BY call.rollout_id, call.turn
"""


def packed_segments(rollouts: Sequence[Rollout]) -> dict[UUID, list[PackedSegment]]:
    """The segments of each rollout's newest attempt, in one query; like `Trajectory.segments`, but packed."""
    found: dict[UUID, list[PackedSegment]] = {rollout.id: [] for rollout in rollouts}
    connection.ensure_connection()
    # Django's own cursors have everything sent as text, which doubles the bytes and has to be decoded.
    with psycopg.Cursor(connection.connection) as cursor:
        for rollout_id, segment, *call in cursor.execute(_CALLS, [list(found)], binary=True):
            segments = found[rollout_id]
            if segment == len(segments):
                segments.append(PackedSegment())
            segments[segment].add(*call)
    return {id_: segments if any(1 in s.loss_mask for s in segments) else [] for id_, segments in found.items()}
