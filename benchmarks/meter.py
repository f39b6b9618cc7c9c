"""CPU time and memory of programs with everything they start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import psutil

_MIB = 1024 * 1024


@dataclass
class Meter:
    """Programs by name, each given by the pid of its first process."""

    pids: Mapping[str, int]
    _start: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        self._start = self._cpu()

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each program since `begin`, its ended children included."""
        return {name: seconds - self._start.get(name, 0.0) for name, seconds in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        return {name: sum(_seconds(process) for process in _tree(pid)) for name, pid in self.pids.items()}

    def memory(self) -> dict[str, float]:
        """MiB of each program; pages that its processes share are counted once."""
        return {name: sum(_mib(process) for process in _tree(pid)) for name, pid in self.pids.items()}

    def resident(self, name: str) -> float:
        """MiB of a program as `ps` counts them: shared pages in full."""
        return sum(process.memory_info().rss for process in _tree(self.pids[name])) / _MIB


def _tree(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)


def _seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _mib(process: psutil.Process) -> float:
    """Proportional set size: of shared pages, such as the database's buffers, each process counts its part."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return float(process.memory_full_info().pss) / _MIB
    return 0.0
