"""Finding, killing and proving the absence of a sandbox's processes, from the host. No Django.

Two facts make this safe without any process of ours staying alive. Every sandbox's launcher and process 1 carry a random label
in their arguments, which nobody inside can change for process 1. And everything inside lives in the process namespace of that
process 1: the kernel ends all of it before process 1 itself is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

_PROC = Path("/proc")


class HostProcess:
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

    async def gone(self) -> None:
        """Return when the process has ended, whoever its parent is."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        loop.add_reader(self._fd, lambda: None if ended.done() else ended.set_result(None))
        try:
            await ended
        finally:
            loop.remove_reader(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        if self._namespace_fd is not None:
            os.close(self._namespace_fd)


def labelled(label: str) -> list[HostProcess]:
    """The living processes with `label` among their arguments; close each."""
    wanted = label.encode()
    found = []
    for pid in _pids():
        try:
            if wanted not in _arguments(pid):
                continue
            process = HostProcess(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if wanted in _arguments(pid):  # still the same one, now that it is held
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


def members(namespace: int) -> list[int]:
    """Host pids of the processes in a pid namespace, zombies apart: they run nothing, and only their parent can reap them.

    Processes that we may not inspect belong to other users, hence not to our sandboxes.
    """
    return [pid for pid in _pids() if namespace_of(pid) == namespace and not _is_zombie(pid)]


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]  # noqa: PTH208 - half the time of iterdir


def _arguments(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
