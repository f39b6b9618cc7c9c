"""The contract of a sandbox backend, as checks that run against a live one. Standard library only, no Django.

`manage.py sandbox_selfcheck BACKEND` prints them; the test suite runs each as a test.
"""

from __future__ import annotations

from sandboxes.selfcheck import channels, cleanup, files, interpreter, isolation, limits, shell, timeouts
from sandboxes.selfcheck.framework import CHECKS, Check, CheckResult, Outcome, run_check, run_checks

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "Outcome",
    "channels",
    "cleanup",
    "files",
    "interpreter",
    "isolation",
    "limits",
    "run_check",
    "run_checks",
    "shell",
    "timeouts",
]
