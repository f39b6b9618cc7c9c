from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.broker.loop import Loop
from sandboxes.broker.output import BoundedOutput, OutputPipe


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(2, 400))
def test_keeps_head_and_tail_and_counts_the_rest(pieces: list[bytes], limit: int) -> None:
    output = BoundedOutput(limit)
    for piece in pieces:
        output.add(piece)
    everything = b"".join(pieces)

    kept, missing = output.take()

    if len(everything) <= limit:
        assert (kept, missing) == (everything, 0)
    else:
        head, note, tail = kept.partition(b"\n[... %d bytes cut ...]\n" % missing)
        assert note
        assert everything.startswith(head)
        assert everything.endswith(tail)
        assert len(head) + len(tail) + missing == len(everything)
        assert limit - 6 <= len(head) + len(tail) <= limit


def test_a_cut_does_not_split_characters() -> None:
    output = BoundedOutput(100)
    output.add(("€" * 1000).encode())
    kept, _ = output.take()
    assert "�" not in kept.decode("utf-8", "replace")


def test_taking_starts_afresh() -> None:
    output = BoundedOutput(10)
    output.add(b"x" * 100)
    output.take()
    output.add(b"y")
    assert output.take() == (b"y", 0)


@pytest.fixture
def loop() -> Iterator[Loop]:
    """The broker's loop, which takes over what it is told of signals."""
    before = signal.getsignal(signal.SIGCHLD)
    yield Loop()
    signal.signal(signal.SIGCHLD, before)
    signal.set_wakeup_fd(-1)


def test_output_that_was_drained_just_before_it_is_to_be_read_is_no_error(loop: Loop) -> None:
    printed = bytearray()
    pipe = OutputPipe(loop, printed.extend)
    reports, reporter = os.pipe()

    def on_report(_events: int) -> None:
        pipe.drain()
        loop.stop()

    loop.watch(reports, on_report)
    os.write(reporter, b"done")  # both are ready in one round, this one first
    os.write(pipe.writer, b"printed by a thread")
    loop.run()
    assert printed == b"printed by a thread"
