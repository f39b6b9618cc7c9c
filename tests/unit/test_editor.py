"""What an edit finds, puts in and shows. Files of real sandboxes are in the conformance suite (`selfcheck/editor.py`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.edits import Change, EditError, around, count_lines, insertion, line_of, line_start, numbered, replacement

PIECES = ["a", "b", " ", "\t", "\n", "\r\n", "\r", "é", "\udcff"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def replaced(text: str, old: str, new: str) -> str:
    return replacement(text, old, new).apply(text)


@pytest.mark.parametrize(
    ("text", "old", "new", "result"),
    [
        ("one two", "two", "2", "one 2"),
        ("one two", " two", "", "one"),
        ("a\nb\nc", "a\nb", "x\ny\nz", "x\ny\nz\nc"),
        ("a\r\nb\r\nc", "a\nb", "x\ny\nz", "x\r\ny\r\nz\r\nc"),
        ("a\r\nb\r\nc", "b", "x\ny", "a\r\nx\r\ny\r\nc"),
        ("a\r\nb\nc\n", "a\nb", "x\ny", "x\r\ny\nc\n"),  # mixed: the ending of the place itself
        ("a\r\nb\r\nc\n", "c", "x\ny", "a\r\nb\r\nx\r\ny\n"),  # mixed, and none in the place: the commonest
        ("a\r\nb\r\n", "a\r\nb", "x\r\ny", "x\r\ny\r\n"),
        ("a\nb\n", "b", "x\r\ny", "a\nx\ny\n"),
        ("x.y (z)", ".y (z)", "\\1", "x\\1"),  # nothing is a pattern
        ("\udcff a", "a", "é", "\udcff é"),
    ],
)
def test_one_place_is_replaced(text: str, old: str, new: str, result: str) -> None:
    assert replaced(text, old, new) == result


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        ("abc", "", "x", "old_str is empty"),
        ("abc", "b", "b", "the same"),
        ("a\r\nb", "a\nb", "a\r\nb", "the same"),
        ("abc", "d", "x", "not in the file, character for character."),
        ("a\nb\na\n", "a", "x", "2 times, at lines 1, 3."),
        ("aaa", "aa", "x", "2 times, at lines 1, 1."),  # they overlap
        ("\r\n\r\n", "\n", "x", "2 times, at lines 1, 2."),
        ("x\n" * 30, "x", "y", "30 times, at lines " + ", ".join(map(str, range(1, 21))) + ", …."),
        ("def f():\n\treturn 1\n", "def f():\n    return 1", "x", "at line 1: view it and copy it exactly."),
        ("a\nb\n", "a  \nb", "x", "at line 1"),
        ("a\n", "\n\n", "x", "not in the file, character for character."),
    ],
)
def test_a_place_that_is_not_clear_is_refused(text: str, old: str, new: str, said: str) -> None:
    with pytest.raises(EditError) as raised:
        replacement(text, old, new)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "line", "new", "result"),
    [
        ("", 0, "a", "a\n"),
        ("a\nb\n", 0, "x", "x\na\nb\n"),
        ("a\nb\n", 1, "x\n", "a\nx\nb\n"),
        ("a\nb\n", 1, "x\n\n", "a\nx\n\nb\n"),
        ("a\nb\n", 1, "\n", "a\n\nb\n"),
        ("a\nb\n", 2, "x", "a\nb\nx\n"),
        ("a\nb", 2, "x\ny\n", "a\nb\nx\ny"),  # the last line had no end, and has none
        ("a\nb", 1, "x", "a\nx\nb"),
        ("a\r\nb\r\n", 1, "x\ny", "a\r\nx\r\ny\r\nb\r\n"),
        ("a\r\nb", 2, "x", "a\r\nb\r\nx"),
    ],
)
def test_lines_are_inserted_whole(text: str, line: int, new: str, result: str) -> None:
    assert insertion(text, line, new).apply(text) == result


@pytest.mark.parametrize(
    ("line", "new", "said"), [(-1, "x", "2 lines"), (3, "x", "from 0 to 2"), (1, "", "nothing would change")]
)
def test_an_insertion_that_has_no_place_is_refused(line: int, new: str, said: str) -> None:
    with pytest.raises(EditError, match=said):
        insertion("a\nb\n", line, new)


@given(TEXTS, TEXTS, TEXTS)
def test_a_replacement_is_exact_and_can_be_taken_back(text: str, old: str, new: str) -> None:
    try:
        change = replacement(text, old, new)
    except EditError:
        return
    assert text[change.at : change.at + len(change.removed)] == change.removed
    assert change.removed.replace("\r\n", "\n") == old.replace("\r\n", "\n")
    changed = change.apply(text)
    assert Change(change.at, change.inserted, change.removed).apply(changed) == text


@given(TEXTS)
def test_lines_are_counted_as_they_are_shown(text: str) -> None:
    length = count_lines(text)
    shown = numbered(text, 1, length, 10**6) if length else ""
    assert len(shown.split("\n")) == max(1, length)
    for line in range(1, length + 1):
        assert line_of(text, line_start(text, line)) == line


def test_a_long_view_ends_at_a_line_and_says_what_is_missing() -> None:
    shown = numbered("".join(f"line {n}\n" for n in range(1, 101)), 11, 100, 100)
    lines = shown.split("\n")
    assert lines[0] == "    11\tline 11"
    assert lines[-1] == f"[lines {11 + len(lines) - 1} to 100 are not shown; use view_range to see them]"
    assert len(shown) < 200


def test_a_long_line_is_cut_and_says_so() -> None:
    assert (
        numbered("x" * 5000 + "\nend\n", 1, 2, 4000)
        == f"     1\t{'x' * 2000}[… 3000 more characters in this line]\n     2\tend"
    )


def test_what_a_change_made_is_shown_with_its_surroundings() -> None:
    text = "".join(f"{n}\n" for n in range(1, 21))
    change = replacement(text, "\n10\n", "\nten\nTEN\n")
    shown = around(change.apply(text), change, 1000)
    assert [line.split("\t")[1] for line in shown.split("\n")] == [*"56789", "ten", "TEN", *map(str, range(11, 16))]


def test_a_file_that_became_empty_is_shown_as_that() -> None:
    change = replacement("a\n", "a\n", "")
    assert around("", change, 1000) == "[the file is empty now]"
