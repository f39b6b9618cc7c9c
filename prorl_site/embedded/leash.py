"""Runs one command and makes sure that nothing of it outlives whoever asked for it. A program, not an import:

    python -I -S leash.py LIFELINE_FD COMMAND [ARG...]

LIFELINE_FD is the reading end of a pipe whose other end only the owner holds. When it closes (the owner closed it, or died in
whatever way, SIGKILL included) every descendant is killed, also those that left the session or were orphaned. SIGTERM, SIGINT,
SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the command; its exit status becomes ours (128 + n after signal n).

A parent-death signal alone would not do: it is bound to the thread that forked, and covers children but no grandchildren.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
KILL_ROUNDS = 300  # of 10 ms; only a process in an uninterruptible wait, or of another user, is still there after that

_libc = ctypes.CDLL(None, use_errno=True)


def processes() -> Iterator[tuple[int, int, int]]:
    """(pid, parent pid, session id) of every process.

    Zombies included: the first thread of a program is one while its other threads still give back their memory.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        _state, parent, _group, session = stat.rpartition(")")[2].split()[:4]
        yield int(entry.name), int(parent), int(session)


def descendants(root: int) -> dict[int, int]:
    """Session id by pid of every process below `root`."""
    children: dict[int, list[tuple[int, int]]] = {}
    for pid, parent, session in processes():
        children.setdefault(parent, []).append((pid, session))
    found: dict[int, int] = {}
    todo = [root]
    while todo:
        for pid, session in children.get(todo.pop(), []):
            found[pid] = session
            todo.append(pid)
    return found


def reap(command: int) -> int | None:
    """Collects ended children; the exit code of `command` if it was among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == command:
            code = os.waitstatus_to_exitcode(status)


def kill_below(command: int, doomed: Callable[[int], bool]) -> None:
    """Kills every descendant whose session id satisfies `doomed`, and collects them, until none is left."""
    for _ in range(KILL_ROUNDS):
        victims = [pid for pid, session in descendants(os.getpid()).items() if doomed(session)]
        if not victims:
            return
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.01)
        reap(command)


def fork_command(arguments: list[str]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # in case this leash itself is killed
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and ignored signals stay so over exec
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - starting the given program is the purpose
    except OSError as error:
        os.write(2, f"cannot start {arguments[0]}: {error.strerror}\n".encode())
        os._exit(127)


def main(lifeline: int, arguments: list[str]) -> int:
    os.set_inheritable(lifeline, False)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    command = fork_command(arguments)
    stop_asked = False

    def forward(number: int, _frame: object) -> None:
        nonlocal stop_asked
        stop_asked = stop_asked or number in STOP_SIGNALS
        os.kill(command, number)

    for number in FORWARDED:
        signal.signal(number, forward)

    while (code := reap(command)) is None:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready:
            kill_below(command, lambda session: True)
            return 128 + signal.SIGKILL
        os.read(woken, 4096)

    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)  # the command is gone: nothing left to pass them to
    # After a crash, what the command detached on purpose (sandboxes) stays: the restarted one picks it up.
    own_session = os.getsid(0)
    kill_below(command, lambda session: stop_asked or session == own_session)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
