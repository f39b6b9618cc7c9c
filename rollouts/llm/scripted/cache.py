"""A simulated prefix cache: which prompts would have been computed already. Counted as vLLM counts, in tokens."""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

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


def _blocks(ids: Sequence[int]) -> Iterator[int]:
    data = array("q", ids).tobytes()
    size = 8 * BLOCK
    fingerprint = 0
    for start in range(0, len(data) - size + 1, size):
        # Two checksums in one number: 32 bits alone would take different prompts for one another now and then.
        block = data[start : start + size]
        fingerprint = zlib.crc32(block, fingerprint & 0xFFFFFFFF) | zlib.adler32(block, fingerprint >> 32) << 32
        yield fingerprint
