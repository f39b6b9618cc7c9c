"""Preparing the text of models and programs for display."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.web.calls import shown_call
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
    assert passages("look\n<tool_call>\nx\n</tool_call>", ("x",)) == [Passage(False, "look")]
    assert passages("<tool_call></tool_call>") == [Passage(False, "<tool_call></tool_call>")]
    assert passages("  ") == []


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"command": "ls\x1b[31m"}, "ls"),
        ({"command": "y", "is_input": True}, "y\n# is_input: true"),
        ({"code": "1", "restart": False}, "1\n# restart: false"),
        ({"path": "/a", "command": "view", "view_range": [1, 5]}, "view /a\n# view_range: [1, 5]"),
        (
            {"path": "/a", "command": "str_replace", "new_str": "c", "old_str": "a\nb"},
            "str_replace /a\n- a\n- b\n+ c",
        ),
        ({"command": "create", "path": "/a", "file_text": "x\ny\n"}, "create /a\n+ x\n+ y"),
        ({"command": 5, "path": "/a"}, '{\n  "command": 5,\n  "path": "/a"\n}'),
        ({}, "{}"),
    ],
)
def test_a_call_is_shown_as_a_person_would_type_it(arguments: dict[str, Any], shown: str) -> None:
    assert shown_call(arguments) == shown
