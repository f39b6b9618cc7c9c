"""The trainer's view of many trajectories at once, in packed bytes that are never unpacked here.

The columns hold packed arrays already. Turning four million of them into Python numbers and then into decimal text takes half a
minute; joining the bytes takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import structlog
from django.db import connection

from rollouts.llm.buffer import NOT_SAMPLED
from rollouts.models import Rollout

logger = structlog.get_logger(__name__)

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


@dataclass
class PackedTokens:
    """What there is to train on: nothing, with a `problem`, where the stored calls cannot be what was sent and sampled."""

    segments: list[PackedSegment] = field(default_factory=list)
    problem: str = ""

    def add(self, turn: int, segment: int, prompt_tokens: int, context: bytes, sampled: bytes, *rest: Any) -> None:
        if segment == len(self.segments):
            self.segments.append(PackedSegment())
        if not 0 <= segment < len(self.segments):
            self.problem = self.problem or f"turn {turn} is of segment {segment}, but there are {len(self.segments)} segments"
            return
        ids = self.segments[segment].token_ids
        sent = (len(ids) + len(context)) // _ITEM_BYTES
        if sent != prompt_tokens:
            self.problem = self.problem or f"turn {turn} sent {prompt_tokens} ids, but {sent} are stored"
        self.segments[segment].add(context, sampled, *rest)

    def close(self) -> None:
        """Nothing more comes: keep what can be trained on."""
        if not any(1 in segment.loss_mask for segment in self.segments):
            self.segments, self.problem = [], ""  # the server gave no ids
        elif self.problem:
            self.segments = []


_CALLS = """
SELECT call.rollout_id, call.turn, call.segment, call.prompt_tokens, call.context_ids, call.sampled_ids, call.logprobs,
  call.policy_version, call.version_spans
FROM rollouts_modelcall call JOIN rollouts_rollout r ON r.id = call.rollout_id AND r.attempt = call.attempt
WHERE call.rollout_id = ANY(%s) ORDER BY call.rollout_id, call.turn
"""


def packed_tokens(rollouts: Sequence[Rollout]) -> dict[UUID, PackedTokens]:
    """The segments of each rollout's newest attempt, in one query; like `Trajectory.segments`, but packed."""
    found = {rollout.id: PackedTokens() for rollout in rollouts}
    connection.ensure_connection()
    # Django's own cursors have everything sent as text, which doubles the bytes and has to be decoded.
    with psycopg.Cursor(connection.connection) as cursor:
        for rollout_id, *call in cursor.execute(_CALLS, [list(found)], binary=True):
            found[rollout_id].add(*call)
    for rollout_id, tokens in found.items():
        tokens.close()
        if tokens.problem:
            logger.error("stored trajectory withheld", rollout=str(rollout_id), problem=tokens.problem)
    return found
