"""From the bytes of a request to values that can be stored: JSON of bounded size and depth, with nothing Postgres refuses."""

from __future__ import annotations

import json
import math
import re
from typing import IO, Any, NoReturn

from django.conf import settings
from rest_framework.parsers import BaseParser

from rollouts.api.problems import Problem
from rollouts.services.errors import FieldError

MAX_DEPTH = 64

# Postgres stores neither in text or jsonb; both reach us as JSON escapes.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class StrictJSONParser(BaseParser):
    """JSON as in RFC 8259: UTF-8, no NaN or Infinity, at most `DATA_UPLOAD_MAX_MEMORY_SIZE` bytes and `MAX_DEPTH` levels."""

    media_type = "application/json"

    def parse(self, stream: IO[bytes], media_type: str | None = None, parser_context: Any = None) -> Any:
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        body = stream.read(limit + 1)  # DRF reads the stream past Django's own check of this setting
        if len(body) > limit:
            raise Problem("body_too_large", f"The body is larger than {limit} bytes. Send it in parts.")
        try:
            value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        except RecursionError as error:
            raise _too_deep() from error
        except ValueError as error:
            raise Problem("malformed_json", f"{error}.") from error
        _check(value, "", 0)
        return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _too_deep() -> Problem:
    return Problem("malformed_json", f"The body is nested more than {MAX_DEPTH} levels deep.")


def _check(value: Any, pointer: str, depth: int) -> None:
    if isinstance(value, str):
        if _UNSTORABLE.search(value):
            raise _invalid(pointer, "Contains a NUL character or half of a surrogate pair.")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _invalid(pointer, "The number is too large.")
    elif isinstance(value, dict | list):
        if depth >= MAX_DEPTH:
            raise _too_deep()
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            if isinstance(key, str) and _UNSTORABLE.search(key):
                raise _invalid(pointer, "A member's name contains a NUL character or half of a surrogate pair.")
            if not isinstance(item, int | None):  # most of a large body; spares building their pointers
                _check(item, f"{pointer}/{escape(key)}", depth + 1)


def _invalid(pointer: str, detail: str) -> Problem:
    return Problem("invalid", detail, [FieldError(pointer, detail)])


def escape(part: str | int) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return str(part).replace("~", "~0").replace("/", "~1")
