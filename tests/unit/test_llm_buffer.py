"""Stored calls: rebuilt, and refused when they cannot be true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.lifecycle import Fidelity
from rollouts.llm.buffer import TokenBuffer, reconstruct, validate
from rollouts.llm.types import ModelCallRecord, VersionSpan


def call(turn: int, segment: int, context: list[int], sampled: list[int], prompt_tokens: int, **changes) -> ModelCallRecord:
    record = ModelCallRecord(
        turn=turn,
        segment=segment,
        context_ids=context,
        sampled_ids=sampled,
        logprobs=[-0.5] * len(sampled),
        text="",
        finish_reason="stop",
        prompt_tokens=prompt_tokens,
        policy="p",
        policy_version=0,
        server_id="",
        latency=0.0,
    )
    return replace(record, **changes)


TWO_SEGMENTS = [
    call(0, 0, [1, 2], [3, 4], 2),
    call(1, 0, [5], [6], 5),
    call(3, 1, [1, 2, 9, 5], [7, 8], 4),
]


def test_prompts_are_rebuilt_from_what_each_call_added():
    assert reconstruct(TWO_SEGMENTS) == [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 9, 5], [7, 8])]
    validate(TWO_SEGMENTS)


def test_the_mask_is_1_on_sampled_ids_only():
    first, second = TokenBuffer.from_calls(TWO_SEGMENTS).segments
    assert first.ids == [1, 2, 3, 4, 5, 6]
    assert first.mask == [0, 0, 1, 1, 0, 1]
    assert first.logprobs == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert second.mask == [0, 0, 0, 0, 1, 1]


def test_one_call_without_logprobs_leaves_its_segment_without():
    first, second = TokenBuffer.from_calls([TWO_SEGMENTS[0], replace(TWO_SEGMENTS[1], logprobs=None), TWO_SEGMENTS[2]]).segments
    assert first.logprobs is None
    assert second.logprobs == [0.0, 0.0, 0.0, 0.0, -0.5, -0.5]


def test_the_records_are_not_changed_by_what_is_built_from_them():
    buffer = TokenBuffer.from_calls(TWO_SEGMENTS)
    buffer.segments[0].ids.append(99)
    reconstruct(TWO_SEGMENTS)[0].sampled_ids.append(99)
    assert TWO_SEGMENTS[0] == call(0, 0, [1, 2], [3, 4], 2)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([call(0, 1, [1], [2], 1)], "segment 1"),
        ([call(0, 0, [1], [2], 1), call(1, 2, [1], [2], 1)], "segment 2"),
        ([call(0, 0, [1], [2], 2)], "sent 2 ids, but 1 are stored"),
        ([call(0, 0, [], [2], 0)], "adds nothing"),
        ([call(0, 0, [1], [2], 1, logprobs=[-1.0, -1.0])], "2 logprobs for 1"),
        ([call(0, 0, [1], [2], 1, logprobs=[float("nan")])], "not finite"),
        ([call(1, 0, [1], [2], 1), call(1, 0, [3], [4], 3)], "turn 1 comes after turn 1"),
        ([call(0, 0, [1], [], 1), call(1, 0, [3], [4], 2)], "ids are not known"),
        ([call(0, 0, [-1], [2], 1)], "negative id"),
        ([call(0, 0, [1], [2], 1), call(1, 0, [3], [4], 3, opened_by="cut")], "says that it began it"),
        ([call(0, 0, [1], [2], 1), call(1, 1, [3], [4], 1, parent_segment=1)], "branches off segment 1"),
        ([call(0, 0, [1], [2, 3], 1, version_spans=(VersionSpan(0, 1),))], "weight versions for 1 of 2"),
        ([call(0, 0, [1], [2], 1, version_spans=(VersionSpan(3, 1),))], "not those of its first and last id"),
    ],
)
def test_what_cannot_be_true_is_refused(calls, message):
    with pytest.raises(ValueError, match=message):
        validate(calls)


def test_segments_go_on_in_any_order():
    """As those of an agent and its sub-agent do."""
    calls = [
        call(0, 0, [1], [2], 1, opened_by="start"),
        call(1, 1, [5], [6], 1, opened_by="subagent", parent_segment=0),
        call(2, 0, [3], [4], 3),
        call(3, 1, [7], [8], 3),
    ]
    assert [segment.ids for segment in validate(calls).segments] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [exchange.prompt_ids for exchange in reconstruct(calls)] == [[1], [5], [1, 2, 3], [5, 6, 7]]


@pytest.mark.parametrize(
    ("calls", "fidelity"),
    [
        ([call(0, 0, [1], [2], 1), call(1, 0, [3], [4], 3)], Fidelity.TOKEN_EXACT),
        (TWO_SEGMENTS, Fidelity.SEGMENTED),
        ([call(0, 0, [1], [2], 1), call(1, 1, [3], [], 1)], Fidelity.TEXT_ONLY),
        ([call(0, 0, [], [], 17, logprobs=None)], Fidelity.TEXT_ONLY),
        ([], Fidelity.TOKEN_EXACT),
    ],
)
def test_the_badge_follows_from_the_calls(calls, fidelity):
    assert validate(calls).fidelity is fidelity


def test_spans_that_cover_the_reply_are_fine():
    spans = (VersionSpan(3, 1), VersionSpan(4, 2))
    validate([call(0, 0, [1], [2, 3, 4], 1, policy_version=3, policy_version_last=4, version_spans=spans)])


TOKENS = st.lists(st.integers(0, 500), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.integers(0, 4), TOKENS, TOKENS), max_size=10))
def test_rebuilding_agrees_with_adding_up(steps):
    """Every step goes on in one of the segments there are, or begins the next."""
    calls, expected, segments = [], [], []
    for turn, (choice, context, sampled) in enumerate(steps):
        if choice >= len(segments):
            choice = len(segments)
            segments.append([])
        prompt = segments[choice] + context
        calls.append(call(turn, choice, context, sampled, len(prompt)))
        expected.append((prompt, sampled))
        segments[choice] = prompt + sampled
    validate(calls)
    assert reconstruct(calls) == expected
    buffer = TokenBuffer.from_calls(calls)
    assert sum(sum(s.mask) for s in buffer.segments) == sum(len(c.sampled_ids) for c in calls)
