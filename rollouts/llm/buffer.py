"""From stored model calls back to the sequences that were sent and sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from rollouts.lifecycle import Fidelity
from rollouts.llm.placed import misplaced
from rollouts.llm.segment_ids import badge, check_place
from rollouts.llm.types import ModelCallRecord, PlacedPicture

NOT_SAMPLED = -1  # in place of a policy version


class Exchange(NamedTuple):
    """What one call sent and what was sampled."""

    prompt_ids: list[int]
    sampled_ids: list[int]


@dataclass
class Segment:
    """One append-only sequence. All lists but `placed` have one entry for each id.

    `mask` is 1 on sampled ids and 0 elsewhere. `logprobs` holds 0.0 where the mask is 0; it is None as a whole as soon as one
    sampled id has no logprob. `versions` says which policy version sampled an id, -1 where the mask is 0. `placed` are the
    pictures that the model saw in place of ids; those are never sampled. `can_go_on` is False when its last reply has no ids:
    what follows them is not known.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    placed: list[PlacedPicture] = field(default_factory=list)
    can_go_on: bool = True


class TokenBuffer:
    """The tokens of one agent, as a trainer sees them: a list of segments, usually just one.

    Segments are begun in order and continued in any order: an agent that has sub-agents goes on in several.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._text_only = False

    @classmethod
    def from_calls(cls, calls: Iterable[ModelCallRecord]) -> Self:
        """Rebuild from stored calls, in order of their turns."""
        buffer = cls()
        for call in calls:
            buffer.add(call)
        return buffer

    @property
    def fidelity(self) -> Fidelity:
        """The badge of what was added so far."""
        return badge(len(self.segments), text_only=self._text_only)

    def add(self, call: ModelCallRecord) -> None:
        """Append a call. Raises ValueError as `check_place` does."""
        check_place(call, len(self.segments), lambda number: self.segments[number].can_go_on)
        if call.segment == len(self.segments):
            self.segments.append(Segment())
        segment = self.segments[call.segment]
        segment.placed += [place.moved(len(segment.ids)) for place in call.placed]
        segment.ids += call.context_ids + call.sampled_ids
        segment.mask += [0] * len(call.context_ids) + [1] * len(call.sampled_ids)
        segment.versions += [NOT_SAMPLED] * len(call.context_ids)
        for version, tokens in call.spans:
            segment.versions += [version] * tokens
        if call.logprobs is None or segment.logprobs is None:
            segment.logprobs = None
        else:
            segment.logprobs += [0.0] * len(call.context_ids) + call.logprobs
        segment.can_go_on = bool(call.sampled_ids)
        self._text_only = self._text_only or not call.sampled_ids


def reconstruct(calls: Iterable[ModelCallRecord]) -> list[Exchange]:
    """The full prompt and the sampled ids of every call, in order. Raises ValueError as `TokenBuffer.add` does."""
    buffer = TokenBuffer()
    exchanges = []
    for call in calls:
        buffer.add(call)
        ids = buffer.segments[call.segment].ids
        exchanges.append(Exchange(ids[: len(ids) - len(call.sampled_ids)], list(call.sampled_ids)))
    return exchanges


def validate(calls: Iterable[ModelCallRecord]) -> TokenBuffer:
    """What the calls add up to. Raises ValueError, naming the turn, when they cannot be what was sent and sampled.

    Of one call after the other, so that it takes memory for the tokens once however many calls there are.
    """
    buffer = TokenBuffer()
    last_turn = -1
    for call in calls:
        if call.turn <= last_turn:
            raise ValueError(f"turn {call.turn} comes after turn {last_turn}")
        last_turn = call.turn
        opens = call.segment == len(buffer.segments)
        buffer.add(call)
        if not call.context_ids and not call.sampled_ids:
            continue  # a server without ids, asked with text: nothing is claimed
        sent = len(buffer.segments[call.segment].ids) - len(call.sampled_ids)
        if sent != call.prompt_tokens:
            raise ValueError(f"turn {call.turn} sent {call.prompt_tokens} ids, but {sent} are stored")
        _check_call(call, opens=opens)
    return buffer


def _check_call(call: ModelCallRecord, *, opens: bool) -> None:
    turn, sampled = call.turn, call.sampled_ids
    if not call.context_ids and (sampled or call.prompt_tokens):  # else it was sent as text
        raise ValueError(f"turn {turn} adds nothing to its prompt")
    if min(call.context_ids) < 0 or min(sampled, default=0) < 0:
        raise ValueError(f"turn {turn} has a negative id")
    if problem := misplaced(call.placed, len(call.context_ids)):
        raise ValueError(f"turn {turn} has a wrong place for a picture: {problem}")
    if call.logprobs is not None:
        _check_logprobs(turn, call.logprobs, len(sampled))
    if call.opened_by and not opens:
        raise ValueError(f"turn {turn} goes on in segment {call.segment}, but says that it began it ({call.opened_by})")
    if call.parent_segment is not None and not 0 <= call.parent_segment < call.segment:
        raise ValueError(f"turn {turn} branches off segment {call.parent_segment}, which does not come before its own")
    if call.version_spans:
        _check_spans(call)


def _check_logprobs(turn: int, logprobs: Sequence[float], sampled: int) -> None:
    if len(logprobs) != sampled:
        raise ValueError(f"turn {turn} has {len(logprobs)} logprobs for {sampled} sampled ids")
    if not all(map(math.isfinite, logprobs)):
        raise ValueError(f"turn {turn} has a logprob that is not finite")


def _check_spans(call: ModelCallRecord) -> None:
    covered = sum(span.tokens for span in call.version_spans)
    if covered != len(call.sampled_ids):
        raise ValueError(f"turn {call.turn} has weight versions for {covered} of {len(call.sampled_ids)} sampled ids")
    last = call.policy_version if call.policy_version_last is None else call.policy_version_last
    if (call.version_spans[0].version, call.version_spans[-1].version) != (call.policy_version, last):
        raise ValueError(f"turn {call.turn} has weight versions that are not those of its first and last id")
