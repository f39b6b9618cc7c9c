"""Editing text exactly: what is found, what is replaced, and what of it is shown. Pure functions, no sandbox.

A text is the whole of a file, with the line endings it has; positions are offsets of characters in it. Where a model writes
"\\n" the file may have "\\r\\n": both count as the same line ending, and what is put in gets the ending of its surroundings.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_CONTEXT_LINES = 4
_MAX_LINE_CHARS = 2000
_MAX_PLACES_NAMED = 20
_NEWLINE = r"(?:\r\n|(?<!\r)\n)"


class EditError(Exception):
    """An edit that cannot be made, in a sentence for whoever asked for it. Nothing has changed."""


class Change(NamedTuple):
    """`removed`, at the offset `at`, becomes `inserted`."""

    at: int
    removed: str
    inserted: str

    def apply(self, text: str) -> str:
        return text[: self.at] + self.inserted + text[self.at + len(self.removed) :]


def replacement(text: str, old: str, new: str) -> Change:
    """The change that puts `new` where `old` is. Raises EditError unless `old` is there exactly once."""
    if not old:
        raise EditError("old_str is empty. To add text without replacing any, use insert.")
    old, new = _plain_newlines(old), _plain_newlines(new)
    if old == new:
        raise EditError("old_str and new_str are the same, so nothing would change.")
    # Looking ahead finds places that overlap, too: which of them is meant is just as unclear.
    found = list(re.finditer(f"(?=({_NEWLINE.join(map(re.escape, old.split(chr(10))))}))", text))
    if not found:
        raise EditError(f"old_str is not in the file, character for character.{_near_miss(text, old)}")
    if len(found) > 1:
        lines = [str(line_of(text, match.start())) for match in found[:_MAX_PLACES_NAMED]]
        more = ", …" if len(found) > _MAX_PLACES_NAMED else ""
        raise EditError(
            f"old_str is in the file {len(found)} times, at lines {', '.join(lines)}{more}. "
            "Add lines before or after it until it is there once."
        )
    return Change(found[0].start(), found[0][1], _with_newlines(new, _newline_of(found[0][1]) or _newline_of(text)))


def insertion(text: str, line: int, new: str) -> Change:
    """The change that puts `new` after line `line` (0: before the first) as lines of its own. Raises EditError."""
    length = count_lines(text)
    if not 0 <= line <= length:
        raise EditError(f"insert_line is {line}, but the file has {length} lines: it must be from 0 to {length}.")
    if not new:
        raise EditError("new_str is empty, so nothing would change.")
    newline = _newline_of(text) or "\n"
    lines = _with_newlines(_plain_newlines(new).removesuffix("\n"), newline)
    at = line_start(text, line + 1)
    if line and not text.endswith("\n", 0, at):  # after a last line that has no end: neither has the new one
        return Change(at, "", newline + lines)
    return Change(at, "", lines + newline)


def count_lines(text: str) -> int:
    """How many lines a text has; a last one need not be ended."""
    return text.count("\n") + (bool(text) and not text.endswith("\n"))


def line_of(text: str, offset: int) -> int:
    """The number, from 1, of the line that has the character at `offset`."""
    return text.count("\n", 0, offset) + 1


def line_start(text: str, line: int) -> int:
    """The offset at which line `line`, from 1, starts; the end of the text when it has fewer."""
    at = 0
    for _ in range(line - 1):
        at = text.find("\n", at) + 1
        if not at:
            return len(text)
    return at


def numbered(text: str, first: int, last: int, max_chars: int) -> str:
    """The lines from `first` to `last` with their numbers, and a note when not all of them fit into about `max_chars`."""
    shown: list[str] = []
    size = 0
    lines = text[line_start(text, first) : line_start(text, last + 1)].removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=first):
        line = line.removesuffix("\r")
        if len(line) > _MAX_LINE_CHARS:
            line = f"{line[:_MAX_LINE_CHARS]}[… {len(line) - _MAX_LINE_CHARS} more characters in this line]"
        size += len(line) + 8
        if shown and size > max_chars:
            return "\n".join([*shown, f"[lines {number} to {last} are not shown; use view_range to see them]"])
        shown.append(f"{number:6}\t{line}")
    return "\n".join(shown)


def around(text: str, change: Change, max_chars: int) -> str:
    """What a change made of `text` (the result), with some lines before and after it."""
    first = max(1, line_of(text, change.at) - _CONTEXT_LINES)
    last = min(count_lines(text), line_of(text, change.at + len(change.inserted)) + _CONTEXT_LINES)
    return numbered(text, first, last, max_chars) if last else "[the file is empty now]"


def _plain_newlines(text: str) -> str:
    return text.replace("\r\n", "\n")


def _with_newlines(text: str, newline: str) -> str:
    return text.replace("\n", newline) if newline == "\r\n" else text


def _newline_of(text: str) -> str:
    """The line ending that most lines have; empty when there is none."""
    windows = text.count("\r\n")
    if not windows and "\n" not in text:
        return ""
    return "\r\n" if windows * 2 > text.count("\n") else "\n"


def _near_miss(text: str, old: str) -> str:
    """Where it would be if spaces at the beginnings and ends of lines did not matter: the commonest mistake."""
    wanted = [line.strip() for line in old.strip("\n").split("\n")]
    if not any(wanted):
        return ""
    lines = [line.strip() for line in text.split("\n")]
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start : start + len(wanted)] == wanted:
            return f" With other spaces, tabs or blank lines around it, it is at line {start + 1}: view it and copy it exactly."
    return ""
