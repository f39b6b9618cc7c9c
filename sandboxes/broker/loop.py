"""A small event loop: descriptors, timers, children. One thread, no polling."""

from __future__ import annotations

import heapq
import os
import select
import time

from .lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
PRIORITY = select.EPOLLPRI


class Timer:
    """A pending call; `cancel` it when it is no longer wanted."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Loop:
    """Dispatches readiness, timers and child exits to callbacks until `stop`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._timers: list[Timer] = []
        self._sweep_at = 1000
        self._children: dict[int, Callable[[int], None]] = {}
        self._running = True
        self._wakeup, wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup_writer, False)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watch(self._wakeup, self._on_signal)

    def watch(self, fd: int, callback: Callable[[int], None], events: int = READ) -> None:
        """Call `callback(events)` whenever `fd` is ready; replaces an earlier watch of it."""
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watched[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; must come before it is closed. Harmless when it is not watched."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        if len(self._timers) >= self._sweep_at:
            # Those that were cancelled long before they are due: the timeouts of commands.
            self._timers = [timer for timer in self._timers if timer.callback is not None]
            heapq.heapify(self._timers)
            self._sweep_at = 1000 + 2 * len(self._timers)
        timer = Timer(time.monotonic() + seconds, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def on_exit(self, pid: int, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` once the child is reaped; killed by signal n is 128 + n, as in a shell."""
        self._children[pid] = callback

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        while self._running:
            for fd, events in self._epoll.poll(self._until_next_timer()):
                callback = self._watched.get(fd)
                if callback is not None:  # an earlier callback of this round may have unwatched it
                    callback(events)
            self._run_timers()

    def _until_next_timer(self) -> float | None:
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0].when - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].when <= now:
            callback = heapq.heappop(self._timers).callback
            if callback is not None:
                callback()

    def _on_signal(self, _events: int) -> None:
        os.read(self._wakeup, 4096)
        while True:
            try:
                # Every child, also adopted orphans: nobody else reaps in this process namespace.
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            callback = self._children.pop(pid, None)
            if callback is not None:
                code = os.waitstatus_to_exitcode(status)
                callback(code if code >= 0 else 128 - code)
