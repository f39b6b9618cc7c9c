"""Processes inside the sandbox: starting tools, listing everything that runs, killing what a command left behind."""

from __future__ import annotations

# No pathlib in the broker: it is slow to import.
# ruff: noqa: PTH115, PTH208
import fcntl
import os
import resource
import termios
import time

from . import prctl
from .lean import signal, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_ABOVE_ALL_TARGETS = 300
_FREEZE_ROUNDS = 200
_COURTESY = 5  # a crowd of the agent's gets less of the processor than the broker that has to stop it, and than the platform
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_FIRST_TO_GO = b"1000"

_oom_score = -1  # an open file, once the broker is protected


def protect_broker() -> None:
    """Make the calling process untouchable for its own sandbox, and the parent of everything orphaned in it.

    Not being dumpable closes ptrace, /proc/1/mem, /proc/1/fd and pidfd_getfd to processes of the same user. Signals that
    Python handles by default would otherwise reach even process 1.
    """
    global _oom_score
    # Opened while it may be: what is not dumpable may not even change itself.
    _oom_score = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    prctl.prctl(prctl.SET_DUMPABLE, 0)
    prctl.prctl(prctl.SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def rlimits(limits: Mapping[str, int]) -> list[tuple[int, int]]:
    """(resource, value) pairs for the fields of `sandboxes.protocol.Limits`."""
    mib = 1024 * 1024
    return [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["file_size_mb"] * mib),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_AS, limits["memory_mb"] * mib),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ]


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    descriptors: Mapping[int, int],
    limits: Iterable[tuple[int, int]],
    terminal: int | None = None,
    adopts_orphans: bool = False,
    ignores_interrupt: bool = False,
) -> int:
    """Start a child in a session of its own and return its pid.

    `descriptors` maps the numbers the child shall see to open ones of ours; all others are closed. `terminal`, one of ours,
    becomes the session's controlling terminal. With `adopts_orphans` the
    child becomes the parent of whatever its descendants orphan (it must reap, as shells do). Limits bind the child and its
    descendants, never the broker, which must be able to start a new child when they are exhausted.
    """
    pid = _fork_expendable()
    if pid:
        return pid
    try:
        os.setsid()
        os.nice(_COURTESY)
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignores_interrupt else signal.SIG_DFL)
        if adopts_orphans:
            prctl.prctl(prctl.SET_CHILD_SUBREAPER, 1)
        # Out of the way first: a source may carry the number of another one's target.
        moved = {target: fcntl.fcntl(source, fcntl.F_DUPFD, _ABOVE_ALL_TARGETS) for target, source in descriptors.items()}
        for target, source in moved.items():
            os.dup2(source, target)
        os.closerange(_ABOVE_ALL_TARGETS, max(moved.values()) + 1)
        try:
            os.chdir(cwd)
        except OSError:
            os.chdir(env.get("HOME", "/"))
        for which, value in limits:
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        os.execve(argv[0], list(argv), dict(env))  # noqa: S606
    except BaseException as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


class Moment:
    """A point in the sandbox's history: tells which processes were started later.

    Start times have a resolution of 10 ms, so processes of the same tick are told apart by the kernel's last pid.
    """

    def __init__(self) -> None:
        self._tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)
        self._last_pid = int(_read_small("/proc/loadavg").split()[-1])

    def is_before(self, pid: int, start_tick: int) -> bool:
        return start_tick > self._tick or (start_tick == self._tick and pid > self._last_pid)


def kill_descendants(root: int, since: Moment, ignore: Iterable[int] = ()) -> None:
    """SIGKILL what descends from `root` and was started after `since`, however it detached itself.

    Processes of `ignore` and their descendants are spared.
    """
    ignored = set(ignore)

    def younger(processes: Mapping[int, Process]) -> set[int]:
        found = (processes[pid] for pid in descendants_of(root, processes, ignored))
        return {process.pid for process in found if since.is_before(process.pid, process.start)}

    hunt(younger)


def kill_everything() -> None:
    """SIGKILL whatever descends from us."""
    hunt(lambda processes: set(descendants_of(os.getpid(), processes, set())))


def hunt(choose: Callable[[Mapping[int, Process]], set[int]]) -> None:
    """SIGKILL the processes that `choose` picks from all of them, until it finds no more."""
    frozen: set[int] = set()
    for _ in range(_FREEZE_ROUNDS):
        # Frozen first and killed last: a frozen process cannot fork away from the hunt.
        found = choose(list_processes()) - frozen
        if not found:
            break
        for pid in found:
            send(pid, signal.SIGSTOP)
        frozen |= found
    else:
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # everything but us, atomically; the tools restart
    for pid in frozen:
        send(pid, signal.SIGKILL)


def interrupt_descendants(root: int, since: Moment) -> None:
    """SIGINT what descends from `root` and was started after `since`."""
    processes = list_processes()
    for pid in descendants_of(root, processes, set()):
        if since.is_before(pid, processes[pid].start):
            send(pid, signal.SIGINT)


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def working_directory(pid: int) -> str:
    """Where a process of ours is. Raises OSError when it is gone."""
    return os.readlink(f"/proc/{pid}/cwd")


class Process:
    """A process as the kernel lists it: `start` in ticks since the boot, `resident` in bytes, shared pages included."""

    __slots__ = ("parent", "pid", "resident", "start", "threads")

    def __init__(self, pid: int, fields: Sequence[bytes]) -> None:
        """`fields` are those of /proc/PID/stat from the state on."""
        self.pid = pid
        self.parent = int(fields[1])
        self.threads = int(fields[17])
        self.start = int(fields[19])
        self.resident = int(fields[21]) * _PAGE


def list_processes() -> dict[int, Process]:
    """All processes of the sandbox by pid, also those that have ended and were not waited for."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = _read_small(f"/proc/{name}/stat").rpartition(b")")[2].split()
        except OSError:
            continue
        found[int(name)] = Process(int(name), fields)
    return found


def descendants_of(root: int, processes: Mapping[int, Process], ignore: set[int]) -> list[int]:
    """Pids of what descends from `root`, without `ignore` and what is below it."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    result: list[int] = []
    parents = [root]
    while parents:
        found = [pid for pid in children.get(parents.pop(), ()) if pid not in ignore]
        result += found
        parents += found
    return result


def _fork_expendable() -> int:
    """Fork a child that the kernel kills before us when memory runs out; what it starts inherits that."""
    ours = os.pread(_oom_score, 16, 0)
    os.pwrite(_oom_score, _FIRST_TO_GO, 0)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:  # not in the child
            os.pwrite(_oom_score, ours, 0)
    return pid


def _read_small(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
