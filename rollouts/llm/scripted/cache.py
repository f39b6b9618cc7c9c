"""Simulated caches: which prompts and pictures would have been computed already. Tokens are counted as vLLM counts them."""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

BLOCK = 16  # ids


class BlockCache:
    """Remembers the `capacity` blocks used last. A block is known by all ids up to its end."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queries = self.hits = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def look_up(self, prompt_ids: Sequence[int]) -> None:
        """Count what of a prompt is there. Its last id is always computed, since the first reply token comes from it."""
        self.queries += len(prompt_ids)
        for block in _blocks(prompt_ids[:-1]):
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            self.hits += BLOCK

    def store(self, ids: Sequence[int]) -> None:
        for block in _blocks(ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


class PictureCache:
    """What was made of pictures. vLLM keeps two books of it, and weights that are loaded empty only one of them."""

    def __init__(self) -> None:
        self._scheduled: set[bytes] = set()
        self._computed: set[bytes] = set()

    def look_up(self, pictures: Iterable[bytes]) -> bool:
        """Compute those that are new. False when one that is scheduled as known is not: of that, vLLM's engine dies."""
        new = set(pictures) - self._scheduled
        self._scheduled |= new
        self._computed |= new
        return self._computed == self._scheduled

    def forget_computed(self) -> None:
        self._computed.clear()

    def clear(self) -> None:
        self._scheduled.clear()
        self._computed.clear()


def _blocks(ids: Sequence[int]) -> Iterator[int]:
    data = array("q", ids).tobytes()
    size = 8 * BLOCK
    fingerprint = 0
    for start in range(0, len(data) - size + 1, size):
        # Two checksums in one number: 32 bits alone would take different prompts for one another now and then.
        block = data[start : start + size]
        fingerprint = zlib.crc32(block, fingerprint & 0xFFFFFFFF) | zlib.adler32(block, fingerprint >> 32) << 32
        yield fingerprint
