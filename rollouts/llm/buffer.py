"""From stored model calls back to the sequences that were sent and sampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from rollouts.llm.types import ModelCallRecord


class Exchange(NamedTuple):
    """What one call sent and what was sampled."""

    prompt_ids: list[int]
    sampled_ids: list[int]


@dataclass
class Segment:
    """One append-only sequence. All lists have one entry for each id.

    `mask` is 1 on sampled ids and 0 elsewhere. `logprobs` holds 0.0 where the mask is 0; it is None as a whole as soon as one
    sampled id has no logprob.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)


class TokenBuffer:
    """The tokens of one conversation, as a trainer sees them: a list of segments, usually just one."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    @classmethod
    def from_calls(cls, calls: Iterable[ModelCallRecord]) -> Self:
        """Rebuild from stored calls, in order."""
        buffer = cls()
        for call in calls:
            buffer.add(call)
        return buffer

    @property
    def ids(self) -> list[int]:
        """The ids of the segment that is being written; empty before the first call."""
        return self.segments[-1].ids if self.segments else []

    def add(self, call: ModelCallRecord) -> None:
        """Append a call. Raises ValueError when its segment is neither the last one nor the next."""
        if call.segment == len(self.segments):
            self.segments.append(Segment())
        elif call.segment != len(self.segments) - 1:
            raise ValueError(f"turn {call.turn} is of segment {call.segment}, but there are {len(self.segments)} segments")
        segment = self.segments[-1]
        segment.ids += call.context_ids + call.sampled_ids
        segment.mask += [0] * len(call.context_ids) + [1] * len(call.sampled_ids)
        if call.logprobs is None or segment.logprobs is None:
            segment.logprobs = None
        else:
            segment.logprobs += [0.0] * len(call.context_ids) + call.logprobs


def reconstruct(calls: Iterable[ModelCallRecord]) -> list[Exchange]:
    """The full prompt and the sampled ids of every call, in order. Raises ValueError as `TokenBuffer.add` does."""
    buffer = TokenBuffer()
    exchanges = []
    for call in calls:
        buffer.add(call)
        end = len(buffer.ids) - len(call.sampled_ids)
        exchanges.append(Exchange(buffer.ids[:end], list(call.sampled_ids)))
    return exchanges


def validate(calls: Sequence[ModelCallRecord]) -> None:
    """Raise ValueError, naming the turn, when stored calls cannot be what was sent and sampled."""
    for call, exchange in zip(calls, reconstruct(calls), strict=True):
        if len(exchange.prompt_ids) != call.prompt_tokens:
            raise ValueError(f"turn {call.turn} sent {call.prompt_tokens} ids, but {len(exchange.prompt_ids)} are stored")
        if not call.context_ids:
            raise ValueError(f"turn {call.turn} adds nothing to its prompt")
        if call.logprobs is not None and len(call.logprobs) != len(call.sampled_ids):
            raise ValueError(f"turn {call.turn} has {len(call.logprobs)} logprobs for {len(call.sampled_ids)} sampled ids")
        if call.logprobs is not None and not all(math.isfinite(value) for value in call.logprobs):
            raise ValueError(f"turn {call.turn} has a logprob that is not finite")
    for earlier, later in itertools.pairwise(calls):
        if later.turn <= earlier.turn:
            raise ValueError(f"turn {later.turn} comes after turn {earlier.turn}")
        if later.segment == earlier.segment and not earlier.sampled_ids:
            raise ValueError(f"turn {later.turn} continues a reply whose ids are not known")
