"""How the text of models and programs is prepared for display. The result is still hostile: templates escape it."""

from __future__ import annotations

import re
from typing import NamedTuple

# CSI and OSC sequences, other two-byte escapes, and control characters that would hide text. Tabs and newlines stay.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_EMPTY_CALL = re.compile(r"<tool_call>\s*</tool_call>")
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)

HEAD_LINES = 12
TAIL_LINES = 8
LINE_WIDTH = 160


def plain(text: str) -> str:
    """Without terminal escapes and invisible control characters, and with progress lines as they ended up."""
    text = text.replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROL.sub("", text)


class Folded(NamedTuple):
    """Long text as a head, a middle to be opened, and a tail; short text is all head. `hidden` counts the middle's lines."""

    head: str
    middle: str
    tail: str
    hidden: int


def fold(text: str) -> Folded:
    """Fold what is longer than a screen. Nothing is cut: head, middle and tail together are the whole plain text."""
    text = plain(text).rstrip("\n")
    lines = text.split("\n")
    if len(lines) > HEAD_LINES + TAIL_LINES + 4:
        middle = lines[HEAD_LINES:-TAIL_LINES]
        return Folded("\n".join(lines[:HEAD_LINES]), "\n".join(middle), "\n".join(lines[-TAIL_LINES:]), len(middle))
    limit = LINE_WIDTH * (HEAD_LINES + TAIL_LINES)
    if len(text) > 2 * limit:  # a few enormous lines
        middle_text = text[limit:-limit]
        return Folded(text[:limit], middle_text, text[-limit:], middle_text.count("\n") + 1)
    return Folded(text, "", "", 0)


class Passage(NamedTuple):
    """A part of a model's reply: its reasoning, or what it said."""

    reasoning: bool
    text: str


def passages(reply: str, hidden: tuple[str, ...] = ()) -> list[Passage]:
    """Split a reply at its `<think>` blocks. `hidden` are tool calls as sampled, which the page shows elsewhere.

    Some chat templates open the block in the prompt, so a reply may also start inside one.
    """
    for raw in hidden:
        if raw:
            reply = reply.replace(raw, "")
    if hidden:  # the calls of agents that came through the gateway are known without their tags
        reply = _EMPTY_CALL.sub("", reply)
    if "</think>" in reply and "<think>" not in reply.partition("</think>")[0]:
        reply = "<think>" + reply
    parts: list[Passage] = []
    position = 0
    for match in _THINK.finditer(reply):
        parts += [Passage(False, reply[position : match.start()]), Passage(True, match[1])]
        position = match.end()
    parts.append(Passage(False, reply[position:]))
    return [Passage(part.reasoning, text) for part in parts if (text := plain(part.text).strip())]
