"""A trajectory's segments as the conversations they belong to: the main one, those of sub-agents, other samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rollouts.llm.types import SegmentCause
from rollouts.models import ModelCall

# The conversation goes on; only its ids could not be continued.
_GOES_ON = {SegmentCause.TEMPLATE, SegmentCause.CUT, SegmentCause.NO_IDS, SegmentCause.EDITED, None}

_WHY = {
    SegmentCause.START: "the first call",
    SegmentCause.TEMPLATE: "the chat template does not let the reply before it be continued as it was sampled",
    SegmentCause.CUT: "the reply before it was cut off and did not end its turn",
    SegmentCause.NO_IDS: "the server gave no token ids for the reply before it",
    SegmentCause.EDITED: "the agent changed, dropped or summarised earlier messages",
    SegmentCause.SUBAGENT: "a conversation of its own began, with another system prompt or first message",
    SegmentCause.SIBLING: "the agent went back: another sample of the same prompt, or another way on from an earlier reply",
}
_NAMES = {SegmentCause.SUBAGENT: "sub-agent", SegmentCause.SIBLING: "other sample", SegmentCause.EDITED: "edited copy"}


@dataclass(eq=False)
class Segment:
    """A sequence that a trainer gets: `context` ids that are masked and `sampled` ids that are trained on, over its turns."""

    number: int
    cause: SegmentCause | None  # None: its call was stored before causes were
    parent: int | None
    turns: list[int] = field(default_factory=list)
    context: int = 0
    sampled: int = 0

    @property
    def why(self) -> str:
        """Why it was begun, in words."""
        return _WHY[self.cause] if self.cause else "the conversation before it could not be continued"

    @property
    def ids(self) -> int:
        return self.context + self.sampled


class Piece(NamedTuple):
    """Turns in a row, in hundredths of the trajectory."""

    name: str
    x: float
    width: float


@dataclass(eq=False)
class Branch:
    """One conversation. `left_at` is the turn of its parent after which it began, None for one that began by itself."""

    name: str
    depth: int = 0
    left_at: int | None = None
    segments: list[Segment] = field(default_factory=list)
    last_turn: int = -1
    left_by: list[Branch] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.last_turn = max(self.last_turn, segment.turns[-1])

    @property
    def number(self) -> int:
        """That of its first segment; it names the branch in addresses."""
        return self.segments[0].number

    @property
    def turns(self) -> list[int]:
        return sorted(turn for segment in self.segments for turn in segment.turns)

    @property
    def sampled(self) -> int:
        return sum(segment.sampled for segment in self.segments)

    @property
    def why(self) -> str:
        return self.segments[0].why


class Place(NamedTuple):
    """Where a turn stands: its branch, its neighbours there, and the segment that it begins, if it does so after another."""

    branch: Branch
    before: int | None
    after: int | None
    begins: Segment | None


class Branches(NamedTuple):
    """The branches of a trajectory, each after the one it left, and the place of every turn."""

    rows: list[Branch]
    places: dict[int, Place]

    @property
    def segments(self) -> list[Segment]:
        return sorted((segment for branch in self.rows for segment in branch.segments), key=lambda segment: segment.number)

    @property
    def several(self) -> bool:
        """Whether there is more than one uninterrupted conversation."""
        return len(self.segments) > 1

    def chosen(self, number: str) -> Branch | None:
        """The branch that a query string names."""
        return next((branch for branch in self.rows if str(branch.number) == number), None)


def branches_of(calls: Iterable[ModelCall]) -> Branches:
    """The branches of one attempt's calls, which come in the order of their turns with their token counts."""
    segments: dict[int, Segment] = {}
    for call in calls:
        if call.segment not in segments:
            cause = SegmentCause(call.opened_by) if call.opened_by else None
            segments[call.segment] = Segment(call.segment, cause, call.parent_segment)
        segment = segments[call.segment]
        segment.turns.append(call.turn)
        segment.context += call.context_tokens  # type: ignore[attr-defined]  # annotated by `timeline.calls_of`
        segment.sampled += call.sampled_tokens  # type: ignore[attr-defined]
    roots: list[Branch] = []
    home: dict[int, Branch] = {}
    named: Counter[str] = Counter()
    for segment in segments.values():
        branch = home.get(_parent(segment))
        if branch is None or segment.cause not in _GOES_ON or branch.last_turn > segment.turns[0]:
            siblings, branch = branch.left_by if branch else roots, _new_branch(segment, branch, named)
            siblings.append(branch)
        branch.add(segment)
        home[segment.number] = branch
    rows = _in_order(roots)
    places = {turn: place for branch in rows for turn, place in _places(branch, begins_first=branch is not rows[0])}
    order = {turn: index for index, turn in enumerate(sorted(places))}
    for branch in rows:
        branch.pieces = _pieces([order[turn] for turn in branch.turns], len(order))
    return Branches(rows, places)


def _parent(segment: Segment) -> int:
    """Its number; -1 for none. The shipped agent has one conversation and need not say what goes on."""
    if segment.parent is not None:
        return segment.parent
    return segment.number - 1 if segment.cause in _GOES_ON else -1


def _new_branch(segment: Segment, parent: Branch | None, named: Counter[str]) -> Branch:
    if not named:
        named["main"] += 1
        return Branch("main")
    kind = _NAMES.get(segment.cause, "branch") if segment.cause else "branch"
    named[kind] += 1
    earlier = [turn for turn in parent.turns if turn < segment.turns[0]] if parent else []
    return Branch(f"{kind} {named[kind]}", parent.depth + 1 if parent else 1, earlier[-1] if earlier else None)


def _in_order(roots: list[Branch]) -> list[Branch]:
    """Each branch followed by those that left it."""
    rows, waiting = [], roots[::-1]
    while waiting:
        branch = waiting.pop()
        rows.append(branch)
        waiting += branch.left_by[::-1]
    return rows


def _places(branch: Branch, *, begins_first: bool) -> Iterable[tuple[int, Place]]:
    turns = branch.turns
    begins = {segment.turns[0]: segment for segment in branch.segments}
    if not begins_first:
        del begins[branch.segments[0].turns[0]]
    for i, turn in enumerate(turns):
        before, after = turns[i - 1] if i else None, turns[i + 1] if i + 1 < len(turns) else None
        yield turn, Place(branch, before, after, begins.get(turn))


def _pieces(indices: list[int], total: int) -> list[Piece]:
    pieces: list[tuple[int, int]] = []
    for index in indices:
        if pieces and pieces[-1][1] == index:
            pieces[-1] = (pieces[-1][0], index + 1)
        else:
            pieces.append((index, index + 1))
    return [Piece("b-active", round(100 * a / total, 2), round(100 * (b - a) / total, 2)) for a, b in pieces]
