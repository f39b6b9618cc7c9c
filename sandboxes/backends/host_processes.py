"""Finding, killing and proving the absence of a sandbox's processes, from the host. No Django.

Two facts make this safe without any process of ours staying alive. Every sandbox's launcher and process 1 carry a random label
in their arguments, which nobody inside can change for process 1. And everything inside lives in the process namespace of that
process 1: the kernel ends all of it before process 1 itself is gone.

Arguments are invisible while a process executes a new program or ends. Process 1 is therefore also known by what bubblewrap
reports of it before letting it run: its pid and the inode of its namespace.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Mark:
    """How the processes of one sandbox are recognised. Pid and namespace are None when no process 1 was reported."""

    label: str
    pid: int | None
    namespace: int | None

    def fits(self, pid: int) -> bool:
        arguments = arguments_of(pid)
        if arguments:
            return self.label.encode() in arguments
        return pid == self.pid and namespace_of(pid) == self.namespace and not is_dead(pid)


def end_marked(mark: Mark, timeout: float) -> list[int]:
    """Kill a sandbox's launcher, its process 1 and all that lives in its namespace, and wait for their end.

    Returns the pids of what is still there after `timeout` seconds: normally none. Blocks, normally for a few milliseconds.
    """
    deadline = time.monotonic() + timeout
    own = namespace_of(os.getpid())  # where launchers live
    while found := _marked(mark):
        try:
            for process in found:
                process.kill()
            late = [process.pid for process in found if not process.wait(deadline - time.monotonic())]
            # Their namespaces are still held, so these numbers can mean no others.
            survivors = [pid for process in found if process.namespace != own for pid in _members(process.namespace)]
        finally:
            for process in found:
                process.close()
        if late or survivors:
            return sorted({*late, *survivors})
    return []


class _HeldProcess:
    """One process, held by descriptors: its number and its namespace's may be reused, but not while they are held.

    `namespace` is the inode of its pid namespace, or None when it ended in the meantime.
    """

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._namespace_fd: int | None = None
        self.namespace: int | None = None
        with contextlib.suppress(OSError):
            self._namespace_fd = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            self.namespace = os.fstat(self._namespace_fd).st_ino

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Whether the process ended within that time, whoever its parent is."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def close(self) -> None:
        os.close(self._fd)
        if self._namespace_fd is not None:
            os.close(self._namespace_fd)


def _marked(mark: Mark) -> list[_HeldProcess]:
    found = []
    for pid in all_pids():
        if not mark.fits(pid):
            continue
        try:
            process = _HeldProcess(pid)
        except ProcessLookupError:
            continue
        if mark.fits(pid):  # still the same one, now that it is held
            found.append(process)
        else:
            process.close()
    return found


def namespace_of(pid: int) -> int | None:
    """The inode of a process's pid namespace; None when it is gone or may not be seen."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return None


def _members(namespace: int | None) -> list[int]:
    """Pids of the processes in a pid namespace, zombies apart: they run nothing, and only their parent can reap them.

    Processes that we may not inspect belong to other users, hence not to our sandboxes.
    """
    if namespace is None:
        return []
    return [pid for pid in all_pids() if namespace_of(pid) == namespace and not is_dead(pid)]


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]  # noqa: PTH208 - half the time of iterdir


def arguments_of(pid: int) -> list[bytes]:
    """Empty when the process is gone, executes a new program or ends."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def user_of(pid: int) -> int | None:
    """The host user who started a process; None when it is gone."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return None
    return int(status.partition("\nUid:")[2].split()[0])


def is_dead(pid: int) -> bool:
    """Whether a process is gone, or runs nothing any more and only waits for its parent."""
    fields = status_fields(pid)
    # The first thread of several also looks like a zombie while another one executes a new program, or when it has ended alone.
    return fields is None or (fields[0] in (b"Z", b"X") and int(fields[17]) <= 1)


def status_fields(pid: int) -> list[bytes] | None:
    """What /proc/PID/stat says from the third field on: state, parent, group, session, ...; None when the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
