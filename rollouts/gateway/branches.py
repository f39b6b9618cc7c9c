"""Which earlier reply a request goes on from. A session is a tree: each reply is a point from which requests may go on.

Agents send whole conversations, so a point is known by a digest of all messages up to it, as the agent would send them back:
what agents are known to drop or rewrite (reasoning, ids of calls, white space around a reply) is not part of it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from rollouts.llm.segment_ids import SegmentIds
from rollouts.llm.types import ChatMessage, TokenPrompt

Key = str  # a digest in hex
START: Key = ""


def keys_of(messages: Sequence[ChatMessage], start: Key = START) -> list[Key]:
    """The digest after each message, each over all that came before."""
    keys = []
    asked: list[str] = []  # the ids of the calls whose results come next
    for message in messages:
        if message["role"] == "assistant":
            asked = [call["id"] for call in message.get("tool_calls", ())]
        digest = hashlib.blake2b(orjson.dumps(_essence(message, asked), option=orjson.OPT_SORT_KEYS), digest_size=16)
        digest.update(start.encode())
        start = digest.hexdigest()
        keys.append(start)
    return keys


def key_of_ids(ids: Sequence[int]) -> Key:
    """The digest of a raw prompt."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()


def _essence(message: ChatMessage, asked: Sequence[str]) -> list[Any]:
    if message["role"] == "assistant":
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        return ["assistant", message["content"].strip(), calls]
    answers = message.get("tool_call_id", "")
    which = asked.index(answers) if answers in asked else None
    essence: list[Any] = [message["role"], message["content"], message.get("name", ""), which]
    if "parts" in message:
        essence.append([part["text"] if part["type"] == "text" else [part["picture"].digest] for part in message["parts"]])
    return essence


class Prompt(NamedTuple):
    """A prompt that was sent before: the first `length` ids of its segment."""

    segment: int
    length: int


@dataclass(frozen=True)
class Point:
    """Right after a reply: `length` ids of its segment lead up to here.

    `last_id` is the reply's last id, None when the server gave none. `reasoned` is a reply of this branch that contains
    reasoning, as sampled, or empty: templates may drop it later.
    """

    segment: int
    length: int
    last_id: int | None
    was_cut: bool
    reasoned: str
    turn: int
    at: float  # unix seconds


class Branches:
    """All points of a session. `offer` is a digest of the tools: what they are is part of every prompt."""

    def __init__(self) -> None:
        self.segments = SegmentIds()
        self._points: dict[tuple[Key, Key], Point] = {}
        self._prompts: dict[tuple[Key, Key], Prompt] = {}
        self._seen: dict[Key, int] = {}  # the segment in which a conversation was first seen
        self._busy: set[int] = set()  # segments that a call under way goes on in

    def leading_to(self, place: Point | Prompt) -> TokenPrompt:
        """What was sent and sampled up to here."""
        return self.segments.first(place.segment, place.length)

    def reserve(self, place: Point | Prompt) -> bool:
        """Whether the call of the caller may go on in the segment of this place: nothing else does, nor has."""
        if place.segment in self._busy or place.length != self.segments.length(place.segment):
            return False
        self._busy.add(place.segment)
        return True

    def release(self, segment: int) -> None:
        """The call that had reserved it is stored, or came to nothing."""
        self._busy.discard(segment)

    def latest_point(self, offer: Key, keys: Sequence[Key]) -> tuple[Point, int] | None:
        """The last reply that these messages contain as it was given, and how many of them lead up to it."""
        for count in range(len(keys), 0, -1):
            if point := self._points.get((offer, keys[count - 1])):
                return point, count
        return None

    def same_prompt(self, offer: Key, keys: Sequence[Key]) -> Prompt | None:
        """Where exactly this was asked before."""
        return self._prompts.get((offer, keys[-1]))

    def extended(self, ids: Sequence[int]) -> Prompt | None:
        """The longest segment that these ids go on from."""
        ends = [Prompt(number, self.segments.length(number)) for number in self.segments.extended_by(array("i", ids))]
        return max(ends, key=lambda end: end.length, default=None)

    def shared(self, keys: Sequence[Key]) -> tuple[int | None, int]:
        """In which segment the beginning of these messages was seen before, and how many of them that are."""
        for count in range(len(keys), 0, -1):
            if (segment := self._seen.get(keys[count - 1])) is not None:
                return segment, count
        return None, 0

    def saw(self, keys: Sequence[Key], segment: int) -> None:
        """The conversation of a call that is stored in `segment`."""
        for key in reversed(keys):
            if self._seen.setdefault(key, segment) != segment:
                break

    def add_prompt(self, offer: Key, key: Key, prompt: Prompt) -> None:
        """A call was stored that had sent this."""
        self._prompts.setdefault((offer, key), prompt)
        self._seen.setdefault(key, prompt.segment)

    def add_point(self, offer: Key, key: Key, point: Point) -> None:
        """Requests that begin with the messages of `key` go on from here."""
        self._points[offer, key] = point
        self._seen.setdefault(key, point.segment)
