"""The contract of a sandbox backend, as checks that run against a live one. No Django.

`manage.py sandbox_selfcheck BACKEND` prints them; the test suite runs each as a test.
"""

from __future__ import annotations

from sandboxes.selfcheck import (
    channels,
    cleanup,
    editor,
    files,
    forwards,
    interpreter,
    isolation,
    limits,
    network,
    shell,
    terminal,
    timeouts,
)
from sandboxes.selfcheck.framework import CHECKS, Check, CheckResult, Outcome, run_check, run_checks

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "Outcome",
    "channels",
    "cleanup",
    "editor",
    "files",
    "forwards",
    "interpreter",
    "isolation",
    "limits",
    "network",
    "run_check",
    "run_checks",
    "shell",
    "terminal",
    "timeouts",
]
