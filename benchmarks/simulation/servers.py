"""A model server: continuous batching, whose calls slow each other down, and a prefix cache."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence

BLOCK = 64  # tokens of a block of the prefix cache
_CACHE_BLOCKS = 5_000  # 320,000 tokens, as an 8B model has beside its weights on a GPU of 80 GB
_PEAK = 2_000.0  # tokens a second, of all calls together, when the batch is large
_HALF = 16.0  # calls at which it gives half of that
_PREFILL = 0.1  # a prompt token that is not in the cache costs as much as this part of a sampled one


class PrefixCache:
    """The blocks that were used last. A prompt finds as much of itself as lies there from its beginning on."""

    def __init__(self, size: int = _CACHE_BLOCKS) -> None:
        self._size = size
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, prompt: Sequence[Hashable]) -> int:
        """How many leading blocks are there; afterwards all are."""
        found = 0
        for block in prompt:
            if block not in self._blocks:
                break
            found += 1
        for block in reversed(prompt):  # the end of a prompt is forgotten before its beginning
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._size:
            self._blocks.popitem(last=False)
        return found


class Server:
    """All its calls go on at the same speed, the slower the more there are. Times are seconds."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.alive = True
        self.cache = PrefixCache()
        self.prompt_blocks = self.found_blocks = 0
        self.work_done = 0.0
        self._progress = 0.0  # what a call that was there from the beginning would have got
        self._at = 0.0
        self._calls: list[tuple[float, int]] = []  # the progress at which each ends

    @property
    def calls(self) -> int:
        return len(self._calls)

    def begin(self, now: float, call: int, prompt: Sequence[Hashable], output: int) -> None:
        self._go_on(now)
        found = self.cache.use(prompt)
        self.prompt_blocks += len(prompt)
        self.found_blocks += found
        work = output + _PREFILL * BLOCK * (len(prompt) - found)
        heapq.heappush(self._calls, (self._progress + work, call))

    def next_end(self) -> tuple[float, int] | None:
        """When the next call ends if nothing else happens, and which."""
        if not self._calls:
            return None
        end, call = self._calls[0]
        return self._at + (end - self._progress) / self._speed(), call

    def end(self, now: float) -> int:
        """The call that ends now."""
        self._go_on(now)
        return heapq.heappop(self._calls)[1]

    def die(self, now: float) -> list[int]:
        """The calls that fail; the cache is lost."""
        self._go_on(now)
        failed = [call for _, call in self._calls]
        self._calls.clear()
        self.cache = PrefixCache()
        self.alive = False
        return failed

    def _speed(self) -> float:
        return _PEAK / (len(self._calls) + _HALF)

    def _go_on(self, now: float) -> None:
        if self._calls:
            progress = (now - self._at) * self._speed()
            self._progress += progress
            self.work_done += progress * len(self._calls)
        self._at = now

    @staticmethod
    def most_work(seconds: float, capacity: int) -> float:
        """What a server does in this time with as many calls as it takes rollouts."""
        return seconds * _PEAK * capacity / (capacity + _HALF)
