"""Requests while they are sampled: what was decided for them, and how far they are."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]


class Plan(NamedTuple):
    """A reply before it is sampled: its ids, what they read as in the answer, and which stop string ends it, if one does."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_string: str | None
    flaw: str = ""


class WeightSpan(NamedTuple):
    """The ids from `start` to before `end` were sampled by weights of this label."""

    version: str
    start: int
    end: int


class Place(NamedTuple):
    """The model sees the picture with this data in place of the `length` ids from `offset`."""

    offset: int
    length: int
    data: bytes


class Given(NamedTuple):
    """A prompt as the model gets it: ids, and the pictures among them."""

    ids: list[int]
    places: tuple[Place, ...] = ()

    def seen(self) -> list[int]:
        """What replies depend on: where a picture begins, its data instead of the id."""
        seen = list(self.ids)
        for place in self.places:
            seen[place.offset] = -1 - zlib.crc32(place.data)
        return seen

    def text_ids(self) -> list[int]:
        """The ids that are not a picture's."""
        text: list[int] = []
        end = 0
        for place in self.places:
            text += self.ids[end : place.offset]
            end = place.offset + place.length
        return text + self.ids[end:]


def fingerprint(ids: Sequence[int], before: int = 0) -> int:
    """Of ids that come after those which `before` is the fingerprint of."""
    return zlib.crc32(array("q", ids).tobytes(), before)


def logprob(weights: str, before: int, token: int) -> float:
    """Of `token` after the ids with the fingerprint `before`: always the same for the same weights, as a model's is."""
    chance = zlib.crc32(f"{weights} {token}".encode(), before) / 2**32
    return round(math.log1p(-chance) / 2, 6)


@dataclass
class Choice:
    """One of the replies that a request asked for, as far as it is sampled."""

    index: int
    plan: Plan
    prefix: int  # fingerprint of the prompt and the ids so far
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)  # fingerprint of what came before each id
    spans: list[WeightSpan] = field(default_factory=list)
    finish_reason: str | None = None

    def step(self, weights: str, label: str) -> None:
        number = len(self.token_ids)
        if number == len(self.plan.token_ids):  # there was nothing to sample
            self.finish_reason = self.plan.finish_reason
            return
        token = self.plan.token_ids[number]
        flawed = number == len(self.plan.token_ids) // 2
        value: float | None = logprob(weights, self.prefix, token)
        if flawed and self.plan.flaw == "omit_logprob":
            value = None
        elif flawed and self.plan.flaw == "nan":
            value = math.nan
        self.contexts.append(self.prefix)
        self.token_ids.append(token)
        self.logprobs.append(value)
        self.prefix = fingerprint([token], self.prefix)
        if self.spans and self.spans[-1].version == label:
            self.spans[-1] = self.spans[-1]._replace(end=number + 1)
        else:
            self.spans.append(WeightSpan(label, number, number + 1))
        if number + 1 == len(self.plan.token_ids):
            self.finish_reason = self.plan.finish_reason

    def text(self, decode: Decode) -> str:
        """What is sampled so far reads as; a character that is not complete yet is held back."""
        if self.finish_reason not in (None, "abort"):
            return self.plan.text
        return decode(self.token_ids).rstrip("\ufffd")[: len(self.plan.text)]


class Request:
    """One request: `choices` are sampled side by side, a token of each at a time."""

    def __init__(self, model: str, given: Given) -> None:
        self.model = model
        self.given = given
        self.seen = given.seen()
        self.choices: list[Choice] = []
        self.aborted = False
        self._woken = asyncio.Event()

    def add(self, plan: Plan) -> None:
        """One more choice."""
        self.choices.append(Choice(len(self.choices), plan, fingerprint(self.seen)))

    @property
    def prompt_ids(self) -> list[int]:
        return self.given.ids

    @property
    def ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def sampled_count(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def seen_and_sampled(self) -> list[int]:
        """The prompt and the first reply."""
        return self.seen + self.choices[0].token_ids

    def step(self, weights: str, label: str, *, everything: bool) -> None:
        """Sample the next token of every choice, or all tokens."""
        while not self.ended:
            for choice in self.choices:
                if choice.finish_reason is None:
                    choice.step(weights, label)
            if not everything:
                return

    def abort(self) -> None:
        """End it with what it has."""
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or "abort"

    def wake(self) -> None:
        self._woken.set()

    async def let_pass(self, seconds: float) -> None:
        """Until that time has passed, or the request is aborted."""
        end = time.monotonic() + seconds
        while not self.aborted and (left := end - time.monotonic()) > 0:
            await self.rest(left)

    async def rest(self, seconds: float | None) -> None:
        """Until that time has passed, or something has changed for this request. None: until something has."""
        self._woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
