"""From packed segments to arrays, without needing NumPy: `numpy.asarray` takes them over without copying."""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from .types import PackedSegment, PlacedPicture

Number = TypeVar("Number", int, float)


class SegmentArrays(NamedTuple):
    """One append-only sequence. The arrays are equally long: int32, uint8 (1 on sampled ids), float32, int32 (-1 on others).

    `pictures` are those among the ids, in order.
    """

    token_ids: array.array[int]
    loss_mask: array.array[int]
    logprobs: array.array[float] | None
    policy_versions: array.array[int]
    pictures: list[PlacedPicture]


def unpack(segment: PackedSegment) -> SegmentArrays:
    """The arrays of a segment that came with `include="segments"`."""
    logprobs = segment["logprobs"]
    return SegmentArrays(
        token_ids=_read(array.array("i"), segment["token_ids"]),
        loss_mask=_read(array.array("B"), segment["loss_mask"]),
        logprobs=None if logprobs is None else _read(array.array("f"), logprobs),
        policy_versions=_expand(segment["version_runs"]),
        pictures=segment["pictures"],
    )


def _expand(runs: Iterable[tuple[int, int]]) -> array.array[int]:
    versions = array.array("i")
    for version, ids in runs:
        versions += array.array("i", [version]) * ids
    return versions


def _read(values: array.array[Number], data: bytes | str) -> array.array[Number]:
    values.frombytes(base64.b64decode(data) if isinstance(data, str) else data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
