"""Whether the sandbox has all the processes that it may have.

Counting them does not tell: the kernel counts some that are not visible inside, such as those of a launcher. So a child of ours
takes on the limit of tools, and tries.
"""

from __future__ import annotations

import os
import resource

from .lean import signal
from .processes import send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loop import Loop

_LONGEST_TRY = 1.0
_LONGEST_PAUSE = 0.5  # what is not looked at for longer is not known


class Crowding:
    """For how many seconds there was no room for one more process, less those in which there was."""

    def __init__(self, loop: Loop, limit: int) -> None:
        self.seconds = 0.0
        self._loop = loop
        self._limit = limit
        self._last_look = 0.0
        self._child: int | None = None
        self._is_full = False

    def clear(self) -> None:
        self.seconds = 0.0
        self._is_full = False

    def look(self, now: float) -> None:
        """Account for the time since the last look, and try again."""
        passed = min(now - self._last_look, _LONGEST_PAUSE)
        self._last_look = now
        self.seconds = max(0.0, self.seconds + (passed if self._is_full else -passed))
        if self._child is None:
            self._try()

    def _try(self) -> None:
        try:
            pid = os.fork()
        except OSError:
            self._is_full = True
            return
        if pid == 0:
            self._start_one()
        self._child = pid
        self._loop.on_exit(pid, self._on_tried)
        self._loop.call_later(_LONGEST_TRY, lambda: self._give_up(pid))

    def _start_one(self) -> None:
        try:
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            most = self._limit if hard == resource.RLIM_INFINITY else min(self._limit, hard)
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            if os.fork():
                os.wait()
            os._exit(0)
        finally:
            os._exit(1)

    def _on_tried(self, exit_code: int) -> None:
        self._child = None
        self._is_full = exit_code != 0

    def _give_up(self, pid: int) -> None:
        if self._child == pid:  # whoever the agent is, it can stop processes of its user
            send(pid, signal.SIGKILL)
