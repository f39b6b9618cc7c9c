"""How this host can hold sandboxes to their limits, and what a broker must be told for it. No Django.

The mechanisms that `SandboxInfo.enforced` names:
* "cgroup": the kernel, for all processes together;
* "watchdog": the broker looks some ten times a second, and ends what exceeds the sum; between two looks more may be used;
* "rlimit": the kernel, for each process, sandbox or user as said;
* "tmpfs size", "disk, counted": the kernel; the broker, which counts what a tree of files takes every few seconds;
* "affinity": the kernel, in whole CPUs;
* "broker": it passes through the broker, which measures it exactly;
* "none": not at all.
`cpus` is "unlimited" where the spec has none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sandboxes.backends.cgroups import Delegation, find_delegation, remove_group
from sandboxes.backends.seccomp import build_filter
from sandboxes.backends.state import Place
from sandboxes.errors import SandboxStartFailed, TeardownFailed
from sandboxes.protocol import Limits

_COUNTS_PROCESSES_BY_NAMESPACE = (5, 14)  # the Linux version


@dataclass(frozen=True)
class Writable:
    """Where files can be written in a sandbox, by paths that its broker sees.

    `memory` are tmpfs mounts; those also in `bounded` have a size of `disk_mb`. `disk` are the directory trees on a disk.
    """

    memory: Sequence[str] = ()
    bounded: Sequence[str] = ()
    disk: Sequence[str] = ()


@dataclass(frozen=True)
class Confinement:
    """What makes a broker hold its sandbox to the limits: a part of its configuration, and the descriptors named there."""

    config: Mapping[str, Any]
    enforced: Mapping[str, str]
    descriptors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Enforcement:
    """What this host offers; found out once by `find_enforcement`."""

    control_groups: Delegation | None
    filters_system_calls: bool

    def facts(self) -> dict[str, str]:
        """For `Backend.probe`: the mechanism for each limit, and whether system calls are filtered."""
        system_calls = "seccomp" if self.filters_system_calls else "none"
        return {"system_calls": system_calls, **self._mechanisms(Limits(cpus=1.0), Writable(bounded=("/",)))}

    @contextlib.contextmanager
    def confinement(self, place: Place, limits: Limits, writable: Writable) -> Iterator[Confinement]:
        """For the broker of a sandbox that is being started; the descriptors are closed with the block.

        Raises SandboxStartFailed.
        """
        pins_cpus = self.filters_system_calls and limits.cpus is not None and "cpu" not in self._controllers
        program = _filter(pins_cpus)
        config: dict[str, Any] = {
            "writable": asdict(writable),
            "system_calls": program.hex(),
            "pins_cpus": pins_cpus,
        }
        enforced = self._mechanisms(limits, writable)
        with contextlib.ExitStack() as stack:
            descriptors = []
            if self.control_groups is not None:
                try:
                    group = self.control_groups.create(place.label, limits, place.directory, stack)
                except OSError as error:
                    raise SandboxStartFailed(f"{place.name}: no control group: {error}") from error
                descriptors.append(group.procs)
                config["control_group"] = {"procs": group.procs}
                if group.memory_events is not None:
                    descriptors.append(group.memory_events)
                    config["control_group"]["memory_events"] = group.memory_events
            yield Confinement(config, enforced, descriptors)

    @property
    def _controllers(self) -> frozenset[str]:
        return frozenset() if self.control_groups is None else self.control_groups.controllers

    def _mechanisms(self, limits: Limits, writable: Writable) -> dict[str, str]:
        by_namespace = _kernel_version() >= _COUNTS_PROCESSES_BY_NAMESPACE
        disk = [*(["tmpfs size"] if writable.bounded else []), *(["disk, counted"] if writable.disk else [])]
        mechanisms = {
            "memory_mb": "cgroup" if "memory" in self._controllers else "watchdog, sum; rlimit, per process",
            "processes": f"rlimit, per {'sandbox' if by_namespace else 'host user'}",
            "disk_mb": "; ".join(disk) or "none",
            "flood_mb": "broker",
            "wall_seconds": "broker",
            "file_size_mb": "rlimit, per file",
            "open_files": "rlimit, per process",
            "cpus": "affinity" if self.filters_system_calls else "none",
            "output_bytes": "broker",
        }
        if "pids" in self._controllers:
            mechanisms["processes"] = "cgroup"
        if "cpu" in self._controllers:
            mechanisms["cpus"] = "cgroup"
        if limits.cpus is None:
            mechanisms["cpus"] = "unlimited"
        return mechanisms


def find_enforcement() -> Enforcement:
    """Looks at this host. May move this process into another control group of its own (see `cgroups`)."""
    return Enforcement(find_delegation(), build_filter() is not None)


def release(place: Place) -> None:
    """Remove what `confinement` made on the host, now that the sandbox's processes are gone. Raises TeardownFailed."""
    try:
        remove_group(place.directory)
    except OSError as error:
        raise TeardownFailed(f"{place.name}: its control group stays: {error}") from error


@functools.cache
def _filter(pins_cpus: bool) -> bytes:
    return build_filter(pins_cpus=pins_cpus) or b""


def _kernel_version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
