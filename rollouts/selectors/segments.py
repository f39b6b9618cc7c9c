"""The trainer's view of many trajectories at once, in packed bytes that are never unpacked here.

The columns hold packed arrays already. Turning four million of them into Python numbers and then into decimal text takes half a
minute; joining the bytes takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import structlog
from django.db import connection

from rollouts.llm.buffer import NOT_SAMPLED
from rollouts.llm.placed import misplaced
from rollouts.llm.types import PlacedPicture
from rollouts.models import Rollout

logger = structlog.get_logger(__name__)

_ITEM_BYTES = 4  # of a token id and of a logprob


class _Call(NamedTuple):
    """A row of `_CALLS` behind the rollout's id. The arrays are packed; `placed` and `spans` are as `ModelCall` has them."""

    turn: int
    segment: int
    opened_by: str
    parent_segment: int | None
    prompt_tokens: int
    context: bytes
    sampled: bytes
    logprobs: bytes | None
    version: int
    spans: list[list[int]]
    placed: list[Any]


_CALLS = """
SELECT call.rollout_id, call.turn, call.segment, call.opened_by, call.parent_segment, call.prompt_tokens, call.context_ids,
  call.sampled_ids, call.logprobs, call.policy_version, call.version_spans, call.placed
FROM rollouts_modelcall call JOIN rollouts_rollout r ON r.id = call.rollout_id AND r.attempt = call.attempt
WHERE call.rollout_id = ANY(%s) ORDER BY call.rollout_id, call.turn
"""


@dataclass
class PackedSegment:
    """A `llm.buffer.Segment`, little-endian: int32 ids, one byte of mask each, float32 logprobs (None when one is unknown).

    `version_runs` are [policy version, ids] pairs that cover all ids in order, with -1 for those that were not sampled.
    `opened_by` says why it was begun, and `parent_segment` from which one it branched off.
    """

    opened_by: str
    parent_segment: int | None
    token_ids: bytearray = field(default_factory=bytearray)
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: bytearray | None = field(default_factory=bytearray)
    version_runs: list[list[int]] = field(default_factory=list)
    placed: list[PlacedPicture] = field(default_factory=list)

    def __len__(self) -> int:
        """How many ids it has."""
        return len(self.loss_mask)

    def add(self, call: _Call) -> None:
        context_ids, sampled_ids = _items(call.context), _items(call.sampled)
        self.placed += [PlacedPicture(len(self) + offset, length, digest) for offset, length, digest in call.placed]
        self.token_ids += call.context
        self.token_ids += call.sampled
        self.loss_mask += b"\0" * context_ids
        self.loss_mask += b"\1" * sampled_ids
        if self.logprobs is not None:
            self.logprobs += b"\0" * len(call.context)
            self.logprobs += call.logprobs or b""
        if call.logprobs is None:
            self.logprobs = None
        self.version_runs.append([NOT_SAMPLED, context_ids])
        self.version_runs += call.spans or [[call.version, sampled_ids]]


@dataclass
class PackedTokens:
    """What there is to train on: nothing, with a `problem`, where the stored calls cannot be what was sent and sampled."""

    segments: list[PackedSegment] = field(default_factory=list)
    problem: str = ""

    def add(self, call: _Call) -> None:
        if call.segment == len(self.segments):
            self.segments.append(PackedSegment(call.opened_by, call.parent_segment))
        if not 0 <= call.segment < len(self.segments):
            self._note(f"turn {call.turn} is of segment {call.segment}, but there are {len(self.segments)} segments")
            return
        segment, context_ids = self.segments[call.segment], _items(call.context)
        sent = len(segment) + context_ids
        if sent != call.prompt_tokens:
            self._note(f"turn {call.turn} sent {call.prompt_tokens} ids, but {sent} are stored")
        if call.placed and (wrong := misplaced([PlacedPicture(*place) for place in call.placed], context_ids)):
            self._note(f"turn {call.turn} has a wrong place for a picture: {wrong}")
        segment.add(call)

    def _note(self, problem: str) -> None:
        """The first one counts."""
        self.problem = self.problem or problem

    def close(self) -> None:
        """Nothing more comes: keep what can be trained on."""
        if not any(1 in segment.loss_mask for segment in self.segments):
            self.segments, self.problem = [], ""  # the server gave no ids
        elif self.problem:
            self.segments = []


def _items(packed: bytes) -> int:
    return len(packed) // _ITEM_BYTES


def packed_tokens(rollouts: Sequence[Rollout]) -> dict[UUID, PackedTokens]:
    """The segments of each rollout's newest attempt, in one query; like `Trajectory.segments`, but packed."""
    found = {rollout.id: PackedTokens() for rollout in rollouts}
    connection.ensure_connection()
    # Django's own cursors have everything sent as text, which doubles the bytes and has to be decoded.
    with psycopg.Cursor(connection.connection) as cursor:
        for rollout_id, *call in cursor.execute(_CALLS, [list(found)], binary=True):
            found[rollout_id].add(_Call(*call))
    for rollout_id, tokens in found.items():
        tokens.close()
        if tokens.problem:
            logger.error("stored trajectory withheld", rollout=str(rollout_id), problem=tokens.problem)
    return found
