"""What a check says."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Status(enum.StrEnum):
    """`warn` is for what works but will not under load, after a restart, or for long."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One thing that was looked at. `remedy` says what to do; empty when there is nothing to do."""

    check: str
    status: Status
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Status.WARN, found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Status.FAIL, found, remedy)
