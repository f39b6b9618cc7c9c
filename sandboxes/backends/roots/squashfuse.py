"""Mounting the squashfs file system of a SIF file with squashfuse. No Django.

The program ends when the kernel has let go of the mount: once it is unmounted here and the last sandbox that uses it is gone.
As root we mount, and squashfuse only answers what the kernel asks, as the sandboxes' host user: it parses files that nobody
vouches for. An ordinary user needs fusermount, which the package fuse3 has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sandboxes.backends.roots.sif import Partition

_PROGRAMS = ("squashfuse_ll", "squashfuse")
_UNMOUNTERS = ("fusermount3", "fusermount")
_DEVICE = "/dev/fuse"
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH = 2
_SECONDS = 20.0

_libc = ctypes.CDLL(None, use_errno=True)


class MountFailed(Exception):
    """squashfuse cannot mount here; the message says what failed."""


def why_not(user: int | None) -> str:
    """Why this host cannot mount SIF files, for sandboxes of the host user `user` (None: our own); "" when it seems to."""
    if _program() is None:
        return "squashfuse is not installed"
    if user is None and _unmounter() is None:
        return "fusermount3 is not installed (package fuse3)"
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return f"{_DEVICE} may not be used by this user"
    return ""


def is_mounted(target: Path) -> bool:
    """Whether a file system is mounted there. One whose program has died is taken away."""
    try:
        os.statvfs(target)  # asks the program, which knows nothing of what the kernel has cached
        return target.stat().st_dev != target.parent.stat().st_dev
    except FileNotFoundError:
        return False
    except OSError:
        unmount(target)
        return False


def mount(sif: Path, partition: Partition, target: Path, user: int | None) -> None:
    """Mount it at the directory `target`, all files belonging to `user` where squashfuse can do that. Raises MountFailed."""
    owner = os.geteuid() if user is None else user
    given = f"offset={partition.offset}"
    # Only new versions know of owners, and old ones refuse what they do not know.
    problem = ""
    for options in (f"{given},uid={owner},gid={owner}", given):
        with _mount_point(target, user) as (place, descriptors):
            problem = _run(sif, options, place, descriptors, user)
        if not problem and is_mounted(target):
            return
        unmount(target)
    raise MountFailed(f"{sif}: {problem or 'squashfuse did not mount it'}")


def unmount(target: Path) -> None:
    """Detach what is mounted there; what uses it may go on. Fine when there is nothing."""
    if os.geteuid() == 0:
        _libc.umount2(os.fsencode(target), _MNT_DETACH)
    elif (program := _unmounter()) is not None:
        subprocess.run([program, "-u", "-z", str(target)], capture_output=True, check=False, timeout=_SECONDS)


@contextlib.contextmanager
def _mount_point(target: Path, user: int | None) -> Iterator[tuple[str, list[int]]]:
    """What squashfuse is told for a mount point, and the descriptors that it inherits."""
    if user is None:
        yield str(target), []
        return
    device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Also for others, of which there are two: the sandboxes in namespaces of their own, and we.
        options = f"fd={device},rootmode={stat.S_IFDIR:o},user_id={user},group_id={user},allow_other"
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
        if _libc.mount(b"squashfuse", os.fsencode(target), b"fuse.squashfuse", flags, options.encode()) != 0:
            raise MountFailed(f"{target}: mount: {os.strerror(ctypes.get_errno())}")
        yield f"/dev/fd/{device}", [device]
    finally:
        os.close(device)


def _run(sif: Path, options: str, place: str, descriptors: list[int], user: int | None) -> str:
    """Start the program, which goes on in the background once it serves; returns what it complained about."""
    file = os.open(sif, os.O_RDONLY | os.O_CLOEXEC)
    try:
        run = subprocess.run(
            [_program() or _PROGRAMS[0], "-o", f"{options},ro", f"/dev/fd/{file}", place],
            pass_fds=[file, *descriptors],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={"PATH": os.defpath},
            check=False,
            timeout=_SECONDS,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        os.close(file)
    return (
        "" if run.returncode == 0 else run.stderr.decode(errors="replace").strip() or f"squashfuse ended with {run.returncode}"
    )


def _program() -> str | None:
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


def _unmounter() -> str | None:
    return next(filter(None, map(shutil.which, _UNMOUNTERS)), None)
