"""What the broker gives up for good before it serves, and with it everything it will ever start."""

from __future__ import annotations

import math
import os

from .lean import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection


def close_inherited(but: Collection[int]) -> None:
    """Close what was open for our start only; the descriptors in `but` stay open, for us alone."""
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - pathlib is slow to import
        if fd in but:
            os.set_inheritable(fd, False)
        elif fd > 2:
            with suppress(OSError):  # the one that we listed with
                os.close(fd)


def join_control_group(procs: int) -> None:
    """Move into the control group whose file `cgroup.procs` is open at `procs`, and close it. Raises OSError."""
    os.write(procs, b"0")
    os.close(procs)


def keep_to_cpus(cpus: float) -> None:
    """Use no more than `cpus` of the CPUs that are open to us, rounded up; which of them is left to chance.

    Binding only together with a system call filter that refuses to change it.
    """
    usable = sorted(os.sched_getaffinity(0))
    first = int.from_bytes(os.urandom(4), "big")
    count = min(len(usable), math.ceil(cpus))
    os.sched_setaffinity(0, {usable[(first + index) % len(usable)] for index in range(count)})
