"""Opaque cursors: places in an ordered list, readable by nobody but us."""

from __future__ import annotations

import base64
import binascii
from uuid import UUID

from rollouts.api.problems import Problem
from rollouts.selectors.results import START, Position


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


def position_cursor(position: Position) -> str:
    """A place in a run's stream of results."""
    return encode(*position)


def read_position(cursor: str) -> Position:
    """The other way; an empty cursor is the start. Raises Problem `invalid_cursor`."""
    if not cursor:
        return START
    xid, rollout_id = decode(cursor, parts=2)
    try:
        position = Position(int(xid), UUID(rollout_id))
    except ValueError as error:
        raise invalid_cursor() from error
    if not 0 <= position.xid < 2**63:
        raise invalid_cursor()
    return position


def invalid_cursor() -> Problem:
    return Problem("invalid_cursor", "Use the `next` of an earlier answer unchanged, or leave the cursor out to start over.")
