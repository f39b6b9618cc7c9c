"""The contract of a sandbox backend, as checks that run against a live one. No Django.

`manage.py sandbox_selfcheck BACKEND` prints them; the test suite runs each as a test.
"""

from __future__ import annotations

from sandboxes.selfcheck import (
    broker,
    channels,
    cleanup,
    editor,
    files,
    forwards,
    hogs,
    interpreter,
    isolation,
    kernel,
    limits,
    network,
    paths,
    peer,
    roots,
    shell,
    sockets,
    terminal,
    timeouts,
)
from sandboxes.selfcheck.framework import CHECKS, Check, CheckResult, Outcome, run_check, run_checks

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "Outcome",
    "broker",
    "channels",
    "cleanup",
    "editor",
    "files",
    "forwards",
    "hogs",
    "interpreter",
    "isolation",
    "kernel",
    "limits",
    "network",
    "paths",
    "peer",
    "roots",
    "run_check",
    "run_checks",
    "shell",
    "sockets",
    "terminal",
    "timeouts",
]
