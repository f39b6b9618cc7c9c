from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.broker.framing import MAX_FRAME, FrameError, FrameReader, encode

headers = st.dictionaries(st.text(max_size=10), st.none() | st.booleans() | st.integers() | st.text(max_size=20), max_size=5)


@given(st.lists(st.tuples(headers, st.binary(max_size=200)), max_size=5), st.integers(1, 50))
def test_frames_survive_any_fragmentation(frames: list[tuple[dict[str, object], bytes]], size: int) -> None:
    stream = b"".join(encode(header, payload) for header, payload in frames)
    reader = FrameReader()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        list(FrameReader().feed(data))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!II", MAX_FRAME + 1, 0),
        struct.pack("!II", 3, 0),
        struct.pack("!II", 10, 7),
        struct.pack("!II", 6, 2) + b"[]",
        struct.pack("!II", 6, 2) + b"{x",
        struct.pack("!II", 6, 2) + b"\xff\xff",
    ],
)
def test_malformed_frames_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameReader().feed(data))


def test_oversized_frames_are_not_sent() -> None:
    with pytest.raises(FrameError, match="exceeds"):
        encode({"id": 1}, bytes(MAX_FRAME))


def test_names_that_are_not_unicode_pass() -> None:
    header = {"path": b"\xff\xfe".decode("utf-8", "surrogateescape")}
    assert list(FrameReader().feed(encode(header))) == [(header, b"")]
