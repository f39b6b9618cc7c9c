"""JSON as models and agents write it, as far as databases, templates and other parsers can take it after us."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

_LEVELS_AROUND = 50  # more than any request or answer that a value is put into has


def decode(text: str, start: int = 0) -> tuple[Any, int]:
    """The value at `start`, and where it ends. Line breaks within strings are taken as they are.

    Raises ValueError for what is no JSON, and for what others could not read or write again: a number that is not finite or of
    more than 64 bits, half of a surrogate pair, or some 200 values within each other.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        orjson.dumps(_as_deep_as_in_an_answer(value))
    except RecursionError as exc:
        raise ValueError("too many values within each other") from exc
    except TypeError as exc:
        raise ValueError(f"it cannot be passed on: {exc}") from exc
    return value, end


def loads(text: str) -> Any:
    """The one value of a text. Raises as `decode` does."""
    begin = len(text) - len(text.lstrip())
    value, end = decode(text, begin)
    if text[end:].strip():
        raise ValueError("something follows the JSON")
    return value


def _as_deep_as_in_an_answer(value: Any) -> Any:
    for _ in range(_LEVELS_AROUND):
        value = [value]
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Not strict: models write line breaks into strings as they are, and what is meant is clear.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_float)
