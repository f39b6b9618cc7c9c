"""Ending all processes of one sandbox, and proving that none is left. No Django.

Apptainer starts several programs for a sandbox, and some of them carry none of our arguments: its own runtime, and the daemons
that show an image's files. All are in the session of the shell that started them, which carries the label; so is process 1, at
first. While one of these two lives, the session's number belongs to no other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from sandboxes.backends.host_processes import Mark, all_pids, arguments_of, end_marked, is_dead, namespace_of, status_fields

# Shells between the worker and Apptainer. The outer one ends with the start; the inner one stays, for the session's number.
SHELL = "/bin/sh"
SCRIPT = '( "$@"; : ); :'

_PAUSE = 0.005


def shell_command(label: str, command: list[str]) -> list[str]:
    return [SHELL, "-c", SCRIPT, label, *command]


def first_process(label: str) -> int | None:
    """The host's pid of the sandbox's process 1, when it runs."""
    own = namespace_of(os.getpid())
    for pid in _labelled(label):
        namespace = namespace_of(pid)
        if namespace is not None and namespace != own:
            return pid
    return None


def end_sandbox(mark: Mark, timeout: float) -> list[int]:
    """Like `host_processes.end_marked`, for what was started through `shell_command`."""
    deadline = time.monotonic() + timeout
    shells = [pid for pid in _labelled(mark.label) if _is_shell(pid, mark.label)]
    for pid in shells:  # so that they start nothing any more
        _signal(pid, signal.SIGSTOP, lambda pid: _is_shell(pid, mark.label))
    known = [*shells, *(pid for pid in (mark.pid,) if pid is not None and mark.fits(pid))]
    sessions = {session for pid in known if (session := session_of(pid)) is not None}
    left = kill_sessions(sessions, set(shells), timeout)
    return left or end_marked(mark, max(0.1, deadline - time.monotonic()))


def kill_sessions(sessions: set[int], spared: set[int], timeout: float) -> list[int]:
    """Kill all processes of these sessions but those spared; returns the pids of those that are still there. Blocks."""
    deadline = time.monotonic() + timeout
    sessions = sessions - {0, os.getsid(0)}
    while members := [pid for pid in all_pids() if session_of(pid) in sessions and pid not in spared and not is_dead(pid)]:
        if time.monotonic() > deadline:
            return members
        for pid in members:
            _signal(pid, signal.SIGKILL, lambda pid: session_of(pid) in sessions)
        time.sleep(_PAUSE)
    return []


def session_of(pid: int) -> int | None:
    fields = status_fields(pid)
    return None if fields is None else int(fields[3])


def _labelled(label: str) -> Iterator[int]:
    """The newest first, as far as numbers tell."""
    return (pid for pid in reversed(all_pids()) if label.encode() in arguments_of(pid))


def _is_shell(pid: int, label: str) -> bool:
    return arguments_of(pid)[:4] == [SHELL.encode(), b"-c", SCRIPT.encode(), label.encode()]


def _signal(pid: int, number: int, is_meant: Callable[[int], bool]) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if is_meant(pid):  # still, now that the number cannot be given to another one
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
