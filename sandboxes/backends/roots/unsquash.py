"""Unpacking the squashfs file system of a SIF file, where it cannot be mounted. No Django."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from sandboxes.backends.roots.sif import Partition

_PROGRAM = "unsquashfs"
_OPTIONS = ("-quiet", "-no-progress", "-no-xattrs")
_PASSABLE = (0, 2)  # 2: something besides contents was left out, such as device nodes, which take root
_SECONDS = 1800.0


class UnpackFailed(Exception):
    """The file system could not be unpacked; the message has what the program said."""


def why_not() -> str:
    """Why this host cannot unpack SIF files; "" when it can."""
    return "" if shutil.which(_PROGRAM) else "unsquashfs is not installed (package squashfs-tools)"


def unpack(sif: Path, partition: Partition, target: Path, user: int | None) -> None:
    """Make the directory `target` of it, all of it owned by `user` (None: us). Raises UnpackFailed, OSError."""
    file = os.open(sif, os.O_RDONLY | os.O_CLOEXEC)
    try:
        run = subprocess.run(
            [_PROGRAM, *_OPTIONS, "-offset", str(partition.offset), "-dest", str(target), f"/dev/fd/{file}"],
            pass_fds=[file],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            check=False,
            timeout=_SECONDS,
            # So everything is that user's, and what a hostile image does to the program, it does to nobody else.
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except subprocess.TimeoutExpired:
        raise UnpackFailed(f"{sif}: not unpacked in {_SECONDS:.0f} s") from None
    finally:
        os.close(file)
    if run.returncode not in _PASSABLE:
        raise UnpackFailed(
            f"{sif}: {run.stderr.decode(errors='replace').strip() or run.stdout.decode(errors='replace').strip()}"
        )
