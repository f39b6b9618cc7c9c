"""Control groups (version 2) for sandboxes, where this user has been given a part of their tree. No Django.

A systemd unit with `Delegate=yes`, a container with a tree of its own, or a batch system that hands over the job's group give
us one. Processes may not be in a group that hands controllers on, so those that are there (workers, and what started them) move
into the group `prorl-workers` below it. Each sandbox gets a group beside that, called by its label, and its broker enters it
before anything of the agent runs. Inside a sandbox control groups are not visible.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sandboxes.protocol import Limits

_WORKERS = "prorl-workers"
_RECORD = "control_group"  # in a sandbox's private directory: the path of its group
_CONTROLLERS = ("cpu", "memory", "pids")
_MIB = 1024 * 1024
_BROKER_MEMORY = 64 * _MIB  # so that the broker's own watchdog, which says who it was, is first
_BROKER_PROCESSES = 4
_CPU_PERIOD = 100_000  # microseconds
_MOVE_ROUNDS = 20
_REMOVE_SECONDS = 1.0


@dataclass(frozen=True)
class Group:
    """The control group of one sandbox that is being started; `procs` and `memory_events` are open files of it."""

    procs: int
    memory_events: int | None


@dataclass(frozen=True)
class Delegation:
    """A control group below which we may make others, with the controllers that those have."""

    directory: Path
    controllers: frozenset[str]

    def settings(self, limits: Limits) -> dict[str, str]:
        """What holds a sandbox to its limits: the files of its group, and what is written to them."""
        settings = {}
        if "memory" in self.controllers:
            settings = {"memory.max": str(limits.memory_mb * _MIB + _BROKER_MEMORY), "memory.swap.max": "0"}
        if "pids" in self.controllers:
            settings["pids.max"] = str(limits.processes + _BROKER_PROCESSES)
        if "cpu" in self.controllers and limits.cpus is not None:
            settings["cpu.max"] = f"{round(limits.cpus * _CPU_PERIOD)} {_CPU_PERIOD}"
        return settings

    def create(self, label: str, limits: Limits, sandbox: Path, stack: contextlib.ExitStack) -> Group:
        """Make a group for one sandbox, whose private directory is `sandbox`; its files are closed with `stack`.

        Raises OSError.
        """
        group = self.directory / label
        # Before it is there: `remove_group` looks for it. Whole or not at all: a part of the path is a group of others.
        written = sandbox / f"{_RECORD}.new"
        written.write_text(str(group))
        written.replace(sandbox / _RECORD)
        group.mkdir()
        for name, value in self.settings(limits).items():
            if (group / name).exists():  # some kernels do not account for swap
                (group / name).write_text(value)
        procs = _open(group / "cgroup.procs", os.O_WRONLY, stack)
        events = _open(group / "memory.events", os.O_RDONLY, stack) if "memory" in self.controllers else None
        return Group(procs, events)


def was_killed_for_memory(sandbox: Path) -> bool:
    """Whether the kernel has killed a process of the sandbox because its group had all the memory that it may have."""
    try:
        lines = (Path((sandbox / _RECORD).read_text()) / "memory.events").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)


def remove_group(sandbox: Path) -> None:
    """Kill what is in a sandbox's group, and remove it. Fine when there is none. Raises OSError when it stays."""
    try:
        path = (sandbox / _RECORD).read_text()
    except FileNotFoundError:
        return
    if not path:  # the disk was full: the group was not made
        return
    group = Path(path)
    with contextlib.suppress(FileNotFoundError):  # before Linux 5.14; its processes were killed one by one
        (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)  # killed processes leave a moment later
        else:
            return


def find_delegation(proc: Path = Path("/proc/self")) -> Delegation | None:
    """The control group that this process was given to use, prepared for `Delegation.create`; None when there is none."""
    own = _own_group(proc)
    if own is None:
        return None
    tree, path = own
    directory = tree / (path.parent if path.name == _WORKERS else path)
    offered = _words(directory / "cgroup.controllers") & set(_CONTROLLERS)
    # Root may write everywhere, also where systemd does not expect it.
    if not offered or not _is_writable(directory) or (os.geteuid() == 0 and directory != tree and not _is_delegated(directory)):
        return None
    try:
        return _prepare(directory, offered)
    except OSError:
        return None


def _prepare(directory: Path, controllers: set[str]) -> Delegation | None:
    if (directory / "cgroup.type").exists():  # it is not the root of the tree, which alone may have both
        _move_processes(directory, directory / _WORKERS)
    handed_on = directory / "cgroup.subtree_control"
    for controller in controllers - _words(handed_on):
        with contextlib.suppress(OSError):
            handed_on.write_text(f"+{controller}")
    enabled = _words(handed_on) & controllers
    return Delegation(directory, frozenset(enabled)) if enabled else None


def _move_processes(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for _ in range(_MOVE_ROUNDS):
        pids = (source / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (target / "cgroup.procs").write_text(pid)
    raise BlockingIOError(f"{source}: processes come as fast as they are moved")


def _own_group(proc: Path) -> tuple[Path, Path] | None:
    """Where the unified hierarchy is mounted, and this process's group in it."""
    groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    path = next((path for number, _, path in groups if number == "0"), None)
    if path is None:
        return None
    for line in (proc / "mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        root, mount_point = fields.split()[3:5]
        if rest.startswith("cgroup2 ") and PurePosixPath(path).is_relative_to(root):
            return Path(mount_point), Path(PurePosixPath(path).relative_to(root))
    return None


def _is_writable(directory: Path) -> bool:
    files = [directory, directory / "cgroup.procs", directory / "cgroup.subtree_control"]
    return all(os.access(path, os.W_OK) for path in files)


def _is_delegated(directory: Path) -> bool:
    try:
        return os.getxattr(directory, "trusted.delegate") == b"1"
    except OSError:
        return False


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()


def _open(path: Path, flags: int, stack: contextlib.ExitStack) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd
