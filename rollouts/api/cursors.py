"""Opaque cursors: places in an ordered list, readable by nobody but us."""

from __future__ import annotations

import base64
import binascii

from rollouts.api.problems import Problem


def encode(*parts: object) -> str:
    return base64.urlsafe_b64encode("~".join(map(str, parts)).encode()).decode().rstrip("=")


def decode(cursor: str, parts: int) -> list[str]:
    """The parts that `encode` was given, as strings. Raises Problem `invalid_cursor`."""
    try:
        decoded = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii").split("~")
    except (binascii.Error, ValueError):
        decoded = []
    if len(decoded) != parts:
        raise invalid_cursor()
    return decoded


def invalid_cursor() -> Problem:
    return Problem("invalid_cursor", "Use the `next` of an earlier answer unchanged, or leave the cursor out to start over.")
