"""Reading the answer of `/v1/completions`: nothing is guessed, and nothing that is missing is filled in."""

from __future__ import annotations

import math
from typing import Any

from rollouts.llm.errors import ModelError
from rollouts.llm.types import Completion, FinishReason

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "repetition": "length",  # vLLM cut a loop off: the reply is as unfinished as at the token limit
    "content_filter": "content_filter",
    "abort": "abort",
}

_MAX_ID = 2**31 - 1


def parse_completion(answer: dict[str, Any], latency: float) -> Completion:
    """The first choice of a completion answer. Raises `ModelError` when it is malformed or a logprob is not finite."""
    try:
        choice = answer["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as exc:
        raise ModelError("the completion answer has no choice with text and finish_reason", retryable=True) from exc
    if not isinstance(text, str) or reason not in _FINISH_REASONS:
        raise ModelError(f"the completion answer has the unknown finish reason {reason!r}", retryable=True)
    token_ids = _token_ids(choice.get("token_ids"))
    return Completion(text, token_ids, _logprobs(choice.get("logprobs"), len(token_ids)), _FINISH_REASONS[reason], latency)


def token_list(answer: dict[str, Any], key: str) -> list[int]:
    """A list of ids that must be there. Raises `ModelError`."""
    ids = answer.get(key)
    if ids is None:
        raise ModelError(f"the answer has no {key!r}", retryable=True)
    return _token_ids(ids)


def _token_ids(value: Any) -> list[int]:
    if value is None:
        return []
    if (
        not isinstance(value, list)
        or not set(map(type, value)) <= {int}
        or not 0 <= min(value, default=0) <= max(value, default=0) <= _MAX_ID
    ):
        raise ModelError("the answer's token ids are not a list of natural numbers of 31 bits", retryable=True)
    return value


def _logprobs(value: Any, count: int) -> list[float] | None:
    """One logprob for each id, or None. A non-finite one is refused: it would silently poison a training batch."""
    values = value.get("token_logprobs") if isinstance(value, dict) else None
    if not isinstance(values, list):
        return None
    present = [v for v in values if isinstance(v, int | float)]
    if not all(map(math.isfinite, present)):
        raise ModelError("the server answered with a logprob that is not finite", retryable=True)
    return [float(v) for v in present] if count and len(present) == len(values) == count else None
