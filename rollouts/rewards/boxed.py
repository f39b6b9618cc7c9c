r"""Finding the final answer of a mathematical reply. Plain text only: nothing here can hang."""

from __future__ import annotations

import re

_OPENING = "\\boxed{"
_BRACE_OR_ESCAPED = re.compile(r"\\.|[{}]", re.DOTALL)


def final_answer(reply: str) -> str | None:
    r"""The contents of the last complete `\boxed{...}` of a reply, stripped; None when there is none.

    The last one counts because a reply that reasons in the open often boxes intermediate results. A box that never closes was
    cut off by a length limit; then the one before it counts. Braces are balanced as TeX does: `\{` and `\}` are characters.
    """
    start = reply.rfind(_OPENING)
    end_of_search = len(reply)
    while start != -1:
        body = start + len(_OPENING)
        end = _closing_brace(reply, body, end_of_search)
        if end is not None:
            return reply[body:end].strip()
        # What does not close this one closes no box around it either, so the search stays linear in the length of the reply.
        end_of_search = start
        start = reply.rfind(_OPENING, 0, start)
    return None


def _closing_brace(text: str, start: int, stop: int) -> int | None:
    """The index of the brace that closes the one before `start`, searching up to `stop`."""
    depth = 1
    for match in _BRACE_OR_ESCAPED.finditer(text, start, stop):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def unwrap(answer: str) -> str:
    r"""An answer without one pair of math delimiters (`$..$`, `$$..$$`, `\(..\)`, `\[..\]`) and without a final full stop."""
    text = answer.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text.removeprefix(opening).removesuffix(closing)
        if len(inner) == len(text) - len(opening) - len(closing) and opening not in inner:
            text = inner
            break
    return text.strip().removesuffix(".").rstrip()
