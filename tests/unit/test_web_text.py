"""Preparing the text of models and programs for display."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.web.text import Passage, fold, passages, plain


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31merror\x1b[0m", "error"),
        ("\x1b]8;;http://x.test\x07link\x1b]8;;\x07", "link"),
        ("\x1b]0;title\x1b\\rest", "rest"),
        ("10 %\r50 %\r100 %\ndone", "100 %\ndone"),
        ("dos\r\nline\r\n", "dos\nline\n"),
        ("tab\tand\x00null\x07", "tab\tandnull"),
        ("plain", "plain"),
    ],
)
def test_escapes_and_progress_lines_are_resolved(raw: str, shown: str) -> None:
    assert plain(raw) == shown


@given(st.text(alphabet="ab\n\r\t\x1b[m", max_size=6000))
def test_folding_keeps_every_line(text: str) -> None:
    folded = fold(text)
    parts = [folded.head, folded.middle, folded.tail] if folded.middle else [folded.head]
    together = "\n".join(parts)
    assert together.replace("\n", "") == plain(text).replace("\n", "")


def test_short_text_is_not_folded() -> None:
    assert fold("one\ntwo\n") == ("one\ntwo", "", "", 0)


def test_one_enormous_line_is_folded() -> None:
    folded = fold("x" * 100_000)
    assert folded.middle
    assert folded.head + folded.middle + folded.tail == "x" * 100_000


def test_reasoning_is_told_from_what_was_said() -> None:
    assert passages("<think>a\nb</think>\n\nc<think>d</think>") == [
        Passage(True, "a\nb"),
        Passage(False, "c"),
        Passage(True, "d"),
    ]


def test_reasoning_that_was_opened_by_the_prompt_or_never_closed() -> None:
    assert passages("still thinking</think>done") == [Passage(True, "still thinking"), Passage(False, "done")]
    assert passages("<think>cut off") == [Passage(True, "cut off")]


def test_tool_calls_as_sampled_are_left_out() -> None:
    assert passages("look\n<tool_call>x</tool_call>", ("<tool_call>x</tool_call>", "")) == [Passage(False, "look")]
    assert passages("  ") == []
