r"""Whether a mathematical answer equals the gold one, by math-verify and SymPy.

Neither is safe to call directly: both can compute for hours on a short expression, and math-verify's own timeout needs SIGALRM
and so the main thread. `rollouts.rewards.isolated` runs this module in a process that can be killed; only that one imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from math_verify import LatexExtractionConfig, parse  # type: ignore[import-untyped]
from math_verify import verify as verify_parsed

from rollouts.rewards.boxed import unwrap

_SHOWN_CHARS = 200
_ONLY_THE_BOX = [LatexExtractionConfig(boxed_match_priority=0)]


class UnparseableGold(ValueError):
    """The gold answer is not a mathematical expression, so nothing can be scored against it."""


@dataclass(frozen=True)
class MathVerdict:
    """The outcome of one comparison. What was parsed is shown as SymPy text; `parsed_answer` is empty when it did not parse."""

    correct: bool
    parsed_gold: str
    parsed_answer: str


def verify(gold: str, answer: str) -> MathVerdict:
    r"""Compare two LaTeX expressions, each with or without math delimiters.

    An answer that does not parse is wrong. Raises `UnparseableGold`, and whatever SymPy raises when it cannot compare: that is
    not a wrong answer but an answer that could not be judged.
    """
    gold_text, answer_text = unwrap(gold), unwrap(answer)
    parsed_gold = _parse(gold_text)
    if not parsed_gold:
        raise UnparseableGold(f"not a mathematical expression: {gold[:_SHOWN_CHARS]!r}")
    if gold_text == answer_text:
        return MathVerdict(correct=True, parsed_gold=_show(parsed_gold), parsed_answer=_show(parsed_gold))
    parsed_answer = _parse(answer_text)
    correct = bool(parsed_answer) and verify_parsed(parsed_gold, parsed_answer, timeout_seconds=None, raise_on_error=True)
    return MathVerdict(correct=bool(correct), parsed_gold=_show(parsed_gold), parsed_answer=_show(parsed_answer))


def _parse(text: str) -> list[Any]:
    """SymPy expressions found in `text`: one, or none."""
    parsed: list[Any] = parse(
        f"\\boxed{{{text}}}",
        extraction_config=_ONLY_THE_BOX,
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return parsed


def _show(parsed: list[Any]) -> str:
    try:
        return ", ".join(str(expression) for expression in parsed)[:_SHOWN_CHARS]
    except ValueError:  # Python refuses to print integers of more than a few thousand digits
        return "(too long to show)"
