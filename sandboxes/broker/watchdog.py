"""Ends what takes more than it may: what the kernel does not bound for us, or bounds without telling anybody.

It looks while something runs, the more often the faster the use grows, and at the end of each command. It ends the running
command that holds most. What earlier commands left in the background is killed when that is the hog, and the next command
says so. Files stay, but what they take does not count again once it was reported, so that a sandbox remains usable.
"""

from __future__ import annotations

import os
import time

from .blame import Scene, end_jobs, end_the_worst, kill_background
from .crowding import Crowding
from .loop import PRIORITY
from .usage import DiskTree, MemoryFiles, is_full, memory_shares, nameless_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .loop import Loop, Timer
    from .tool import Tool

_MIB = 1024 * 1024
_SHORTEST, _LONGEST = 0.02, 0.1  # seconds between two looks while a command runs
_LONGEST_IDLE = 0.5  # while only background processes do
_COST_SHARE = 20  # looking takes at most this part of a CPU
_BETWEEN_NAMELESS = 0.5
_LONGEST_CROWDED = 1.0  # so long may a sandbox have all the processes it may have
_SETTLING = 1.0  # what was killed is not gone at once


class Writable:
    """Where files can be written, by path. `memory` are tmpfs mounts; those also in `bounded` are no larger than `disk_mb`.

    `disk` are directory trees on a disk shared with others, each of which may grow to `disk_mb`.
    """

    def __init__(self, memory: Sequence[str] = (), bounded: Sequence[str] = (), disk: Sequence[str] = ()) -> None:
        self.memory = memory
        self.bounded = bounded
        self.disk = disk


class Watchdog:
    """Holds tools to the fields of `sandboxes.protocol.Limits` that are about all processes together.

    `memory_events` is the open file `memory.events` of the sandbox's control group, if it has one.
    """

    def __init__(
        self, loop: Loop, tools: Sequence[Tool], limits: Mapping[str, int], writable: Writable, memory_events: int = -1
    ) -> None:
        self._loop = loop
        self._tools = tools
        self._memory = limits["memory_mb"] * _MIB
        self._processes = limits["processes"]
        self._disk = limits["disk_mb"] * _MIB
        self._flood = limits["flood_mb"] * _MIB
        self._files = MemoryFiles(writable.memory)
        self._excused = 0  # bytes of memory files that were reported
        self._bounded = writable.bounded
        self._full: set[str] = set()  # those of them that were reported
        self._trees = [DiskTree(path) for path in writable.disk]
        self._nameless: dict[int, int] = {}
        self._next_nameless = 0.0
        self._crowding = Crowding(loop, self._processes)
        self._settling: dict[object, float] = {}  # what was acted on -> until when
        self._untold = ""  # the limit that was exceeded when there was no job to be told
        self._last_look = 0.0
        self._last_used = 0
        self._timer: Timer | None = None
        self._memory_events = memory_events
        self._kills = self._count_kills()
        for tool in tools:
            tool.watchdog = self
        if memory_events >= 0:
            loop.watch(memory_events, lambda _: self._on_memory_event(), PRIORITY)

    def on_begin(self, tool: Tool) -> None:
        """A job of this tool has begun."""
        if self._untold:
            tool.exceed(self._take_untold())
        if self._timer is None or self._timer.when > time.monotonic() + _LONGEST:
            self._look_after(_SHORTEST)

    def on_end(self, tool: Tool) -> str:
        """A job of this tool has ended by itself: the limit that was exceeded since the last look, or ""."""
        if self._untold:
            return self._take_untold()
        if tool.printed > self._flood:
            kill_background(self._tools)
            return "flood_mb"
        if self._newly_full():
            return "disk_mb"
        return "memory_mb" if self._newly_killed() else ""

    # One look.

    def _look(self) -> None:
        begun, spent = time.monotonic(), time.process_time()
        self._timer = None
        scene = Scene(self._tools)
        if begun >= self._next_nameless:
            self._nameless = nameless_files(scene.processes)
            self._next_nameless = begun + max(_BETWEEN_NAMELESS, _COST_SHARE * (time.process_time() - spent))
        self._look_at_output(begun)
        self._look_at_processes(scene, begun)
        self._look_at_disk(begun)
        pause = self._look_at_memory(scene, begun)
        jobs = any(tool.job_since is not None for tool in self._tools)
        if self._timer is None and (jobs or scene.has_background):
            longest = _LONGEST if jobs else _LONGEST_IDLE
            self._look_after(max(_SHORTEST, min(longest, pause), _COST_SHARE * (time.process_time() - spent)))

    def _look_at_output(self, now: float) -> None:
        for tool in self._tools:
            if self._is_to_act(tool, tool.printed > self._flood, now):
                kill_background(self._tools)  # who printed it cannot be told
                if not end_jobs("flood_mb", [tool]):
                    self._untold = "flood_mb"

    def _look_at_processes(self, scene: Scene, now: float) -> None:
        threads = {process.pid: process.threads for process in scene.processes}
        if 2 * sum(threads.values()) < self._processes:
            self._crowding.clear()
        else:
            self._crowding.look(now)
        if self._is_to_act("processes", self._crowding.seconds > _LONGEST_CROWDED, now):
            self._crowding.clear()
            if not end_the_worst("processes", scene, threads):
                self._end_background("processes")

    def _look_at_disk(self, now: float) -> None:
        exceeded = self._newly_full()
        for tree in self._trees:
            tree.step(self._disk, self._files.count_others(self._nameless))
            exceeded |= self._is_to_act("disk_mb", tree.exceeds(self._disk), now)
        if exceeded and not end_jobs("disk_mb", self._tools):
            self._end_background("disk_mb")

    def _look_at_memory(self, scene: Scene, now: float) -> float:
        """Returns after how many seconds to look again."""
        files = self._files.count(self._nameless)
        self._excused = min(self._excused, files)
        allowed = self._memory + self._excused
        # Shared pages are counted once for each process here; whether that matters is looked at only when it may.
        used = estimate = files + sum(process.resident for process in scene.processes)
        if estimate > allowed:
            shares = memory_shares(scene.processes)
            private = sum(share for share, _ in shares.values())
            # Shared memory may be mapped files: never count them twice.
            used = private + max(files, sum(share for _, share in shares.values()))
            if self._is_to_act("memory_mb", used > allowed, now):
                if files > private:
                    self._excused = files
                    is_told = end_jobs("memory_mb", self._tools)
                else:
                    is_told = end_the_worst("memory_mb", scene, {pid: sum(share) for pid, share in shares.items()})
                if not is_told:
                    self._end_background("memory_mb")
        growth = max(0, estimate - self._last_used) / max(now - self._last_look, _SHORTEST)
        self._last_look, self._last_used = now, estimate
        return max(0, allowed - used) / growth / 4 if growth else _LONGEST_IDLE

    # What is done about it.

    def _is_to_act(self, subject: object, is_exceeded: bool, now: float) -> bool:
        """Not again while what was killed for it goes away."""
        if not is_exceeded:
            self._settling.pop(subject, None)
            return False
        if now < self._settling.get(subject, 0.0):
            return False
        self._settling[subject] = now + _SETTLING
        return True

    def _end_background(self, limit: str) -> None:
        kill_background(self._tools)
        self._untold = limit

    def _take_untold(self) -> str:
        limit, self._untold = self._untold, ""
        return limit

    def _newly_full(self) -> bool:
        full = {path for path in self._bounded if is_full(path)}
        known, self._full = self._full, full
        return bool(full - known)

    def _on_memory_event(self) -> None:
        if self._newly_killed() and not end_jobs("memory_mb", self._tools):
            self._untold = "memory_mb"

    def _newly_killed(self) -> bool:
        """Whether the kernel has killed a process of the sandbox's control group since the last call."""
        before, self._kills = self._kills, self._count_kills()
        return self._kills > before

    def _count_kills(self) -> int:
        if self._memory_events < 0:
            return 0
        lines = (line.split() for line in os.pread(self._memory_events, 4096, 0).splitlines())
        return next((int(count) for name, count in lines if name == b"oom_kill"), 0)

    def _look_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)
