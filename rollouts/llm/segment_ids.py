"""The ids of an agent's segments and the places of pictures among them, for as long as the agent may go on from them."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from rollouts.lifecycle import Fidelity
from rollouts.llm.types import ModelCallRecord, PlacedPicture, TokenPrompt


class SegmentIds:
    """What `TokenBuffer` knows of ids, in 4 bytes each: agents that begin many segments have very many ids."""

    def __init__(self) -> None:
        self._ids: list[array[int]] = []
        self._placed: list[list[PlacedPicture]] = []
        self._can_go_on: list[bool] = []
        self._text_only = False

    def __len__(self) -> int:
        """How many segments there are."""
        return len(self._ids)

    @property
    def fidelity(self) -> Fidelity:
        """The badge of what was added so far."""
        return badge(len(self._ids), text_only=self._text_only)

    def length(self, segment: int) -> int:
        """How many ids it has."""
        return len(self._ids[segment])

    def first(self, segment: int, length: int) -> TokenPrompt:
        """Its first `length` ids, which end where a call's do."""
        placed = tuple(place for place in self._placed[segment] if place.offset < length)
        return TokenPrompt(self._ids[segment][:length].tolist(), placed)

    def extended_by(self, ids: array[int]) -> list[int]:
        """The segments that `ids` begin with and go on from. Of those with pictures none: ids alone do not send them again."""
        return [
            number
            for number, (known, placed, can_go_on) in enumerate(zip(self._ids, self._placed, self._can_go_on, strict=True))
            if can_go_on and not placed and len(known) < len(ids) and known == ids[: len(known)]
        ]

    def add(self, call: ModelCallRecord) -> None:
        """Append a call. Raises ValueError as `check_place` does."""
        check_place(call, len(self._ids), self._can_go_on.__getitem__)
        if call.segment == len(self._ids):
            self._ids.append(array("i"))
            self._placed.append([])
            self._can_go_on.append(True)
        self._placed[call.segment] += [place.moved(len(self._ids[call.segment])) for place in call.placed]
        self._ids[call.segment].extend(call.context_ids)
        self._ids[call.segment].extend(call.sampled_ids)
        self._can_go_on[call.segment] = bool(call.sampled_ids)
        self._text_only = self._text_only or not call.sampled_ids


def badge(segments: int, *, text_only: bool) -> Fidelity:
    """Of so many segments; `text_only` says whether a reply came without ids."""
    if text_only:
        return Fidelity.TEXT_ONLY
    return Fidelity.SEGMENTED if segments > 1 else Fidelity.TOKEN_EXACT


def check_place(call: ModelCallRecord, segments: int, can_go_on: Callable[[int], bool]) -> None:
    """Raise ValueError when the call's segment is neither one of so many nor the next, or cannot be continued."""
    if call.segment == segments:
        return
    if not 0 <= call.segment < segments:
        raise ValueError(f"turn {call.turn} is of segment {call.segment}, but there are {segments} segments")
    if not can_go_on(call.segment):
        raise ValueError(f"turn {call.turn} continues a reply whose ids are not known")
