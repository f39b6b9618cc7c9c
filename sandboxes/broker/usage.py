"""What the sandbox takes of the host's memory and disk, as far as that can be seen from inside."""

from __future__ import annotations

# No pathlib in the broker: it is slow to import.
# ruff: noqa: PTH116, PTH123, PTH208
import itertools
import os
import stat
import time

from .lean import suppress
from .processes import Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_INODE_BYTES = 1024  # what the kernel keeps for each file of a tmpfs, roughly
_BLOCK = 512  # the unit of st_blocks
_ENTRIES_PER_STEP = 500
_WALK_SHARE = 20  # walking a tree takes at most this part of a CPU
_LONGEST_BETWEEN_WALKS = 10.0  # seconds


class MemoryFiles:
    """Files that are memory: those of tmpfs mounts, System V segments, and memory files, which have no name at all."""

    def __init__(self, mounts: Iterable[str]) -> None:
        by_device = {os.stat(path).st_dev: path for path in mounts}
        self._mounts = list(by_device.values())
        fd = os.memfd_create("probe")
        self._memory_files_device = os.fstat(fd).st_dev
        os.close(fd)
        self._devices = {*by_device, self._memory_files_device}

    def count(self, nameless: dict[int, int]) -> int:
        """Bytes in use now; `nameless` as from `nameless_files`."""
        used = nameless.get(self._memory_files_device, 0) + _system_v_bytes()
        for path in self._mounts:
            status = os.statvfs(path)
            used += (status.f_blocks - status.f_bfree) * status.f_frsize + (status.f_files - status.f_ffree) * _INODE_BYTES
        return used

    def count_others(self, nameless: dict[int, int]) -> int:
        """Bytes of the files among `nameless` that are not memory."""
        return sum(size for device, size in nameless.items() if device not in self._devices)


class DiskTree:
    """The disk blocks of a directory tree, counted in small steps so that nobody waits for it.

    `used` is the last complete count in bytes. Where a directory may not be read, it is at least what its file system has lost
    to anybody since the start.
    """

    def __init__(self, path: str) -> None:
        self.used = 0
        self._excused = 0
        self._path = path
        self._free_at_first = self._free_at_walk = self._free()
        self._walk: Iterator[int] | None = None
        self._counted = 0
        self._spent = 0.0
        self._unreadable = False
        self._next_walk = self._latest_walk = 0.0

    def exceeds(self, limit: int) -> bool:
        """Whether there is more than `limit` bytes beyond what was there when it was said before."""
        self._excused = min(self._excused, self.used)
        if self.used <= limit + self._excused:
            return False
        self._excused = self.used
        return True

    def step(self, limit: int, nameless: int) -> None:
        """Go on counting when it is time to: when `limit` bytes may soon be exceeded, and now and then.

        `nameless` bytes are in open files of the same disk that no directory has any more.
        """
        now, begun = time.monotonic(), time.process_time()
        if self._walk is None:
            if now < self._next_walk:
                return
            free = self._free()
            if now < self._latest_walk and self._free_at_walk - free < limit // 8:
                return
            self._free_at_walk, self._counted, self._spent, self._unreadable = free, 0, 0.0, False
            self._walk = self._sizes()
        counted = 0
        for size in itertools.islice(self._walk, _ENTRIES_PER_STEP):
            self._counted += size
            counted += 1
        self._spent += time.process_time() - begun
        if counted < _ENTRIES_PER_STEP:
            self._walk = None
            self.used = self._counted + nameless
            if self._unreadable:
                self.used = max(self.used, self._free_at_first - self._free())
            self._next_walk = now + _WALK_SHARE * self._spent
            self._latest_walk = now + max(_LONGEST_BETWEEN_WALKS, _WALK_SHARE * self._spent)

    def _sizes(self) -> Iterator[int]:
        linked: set[int] = set()
        directories = [self._path]
        while directories:
            try:
                entries = os.scandir(directories.pop())
            except PermissionError:
                self._unreadable = True
                continue
            except OSError:
                continue  # removed meanwhile
            with entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        directories.append(entry.path)
                    elif status.st_nlink > 1:
                        if status.st_ino in linked:
                            continue
                        linked.add(status.st_ino)
                    yield status.st_blocks * _BLOCK

    def _free(self) -> int:
        status = os.statvfs(self._path)
        return status.f_bfree * status.f_frsize


def is_full(path: str) -> bool:
    """Whether nothing more can be written to a file system."""
    return os.statvfs(path).f_bavail == 0


def nameless_files(processes: Iterable[Process]) -> dict[int, int]:
    """Bytes of the open files that are in no directory, by device. Costs a system call for each open file."""
    sizes: dict[tuple[int, int], int] = {}
    for process in processes:
        directory = f"/proc/{process.pid}/fd"
        try:
            names = os.listdir(directory)
        except OSError:
            continue  # it ended, or hides what it has open
        for name in names:
            with suppress(OSError):  # closed meanwhile
                status = os.stat(f"{directory}/{name}")
                if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK
    total: dict[int, int] = {}
    for (device, _), size in sizes.items():
        total[device] = total.get(device, 0) + size
    return total


def memory_shares(processes: Iterable[Process]) -> dict[int, tuple[int, int]]:
    """For each pid its bytes of (private memory, shared memory); pages that several processes have are divided among them.

    Reads the page tables: some milliseconds for each GiB. The code of programs and cached files are not counted.
    """
    return {process.pid: _memory_share(process) for process in processes}


def _memory_share(process: Process) -> tuple[int, int]:
    sizes: dict[bytes, int] = {}
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
            for line in file:
                name, _, value = line.partition(b":")
                if value.endswith(b"kB\n"):
                    sizes[name] = int(value[:-3]) * 1024
    except PermissionError:
        return process.resident, 0  # it made itself not dumpable
    except OSError:
        return 0, 0  # it ended
    anonymous = sizes.get(b"Pss_Anon", sizes.get(b"Pss", 0))
    return anonymous + sizes.get(b"SwapPss", 0), sizes.get(b"Pss_Shmem", 0)


def _system_v_bytes() -> int:
    try:
        with open("/proc/sysvipc/shm", "rb") as file:
            next(file)
            return sum(int(rss) + int(swap) for *_, rss, swap in (line.split() for line in file))
    except OSError:
        return 0  # a kernel without them
