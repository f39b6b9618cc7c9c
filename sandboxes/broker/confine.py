"""What the broker gives up for good before it serves, and with it everything it will ever start."""

from __future__ import annotations

import ctypes
import math
import os
import struct

from .lean import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)


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


def refuse_system_calls(program: bytes) -> None:
    """Install a classic BPF program as system call filter. Raises OSError."""
    instructions = ctypes.create_string_buffer(program, len(program))
    fields = struct.pack("@HP", len(program) // _INSTRUCTION_BYTES, ctypes.addressof(instructions))
    header = ctypes.create_string_buffer(fields, len(fields))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _prctl(option: int, *values: int) -> None:
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if _libc.prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
