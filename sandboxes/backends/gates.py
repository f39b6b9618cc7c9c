"""How many sandboxes may be starting at the same time on this node, over all of its processes. No Django.

Many starts at once make each of them slow, and many mounts of one image at once make some of them fail. A gate has a number of
slots, each of them a file that whoever is starting a sandbox holds a lock on: the kernel gives it back however its holder ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxes.errors import SandboxStartFailed
from sandboxes.options import NodeOptions
from sandboxes.protocol import Root, RootKind

RETRY_PAUSES = (0.2, 1.0)  # seconds before a start that failed for a reason that passes is tried again

# What many starts at the same moment do to each other: no process, no memory, an image or a mount that is busy.
_PASSING = re.compile(
    "resource temporarily unavailable|cannot allocate memory|device or resource busy|text file busy|too many open files|"
    "transport endpoint is not connected",
    re.IGNORECASE,
)

_FOLDER = ".gates"  # the leading dot keeps it out of the list of sandboxes
_FIRST_PAUSE = 0.004
_LONGEST_PAUSE = 0.1


class StartGates:
    """The gates of one state directory: one for the node, and one for each image."""

    def __init__(self, state_dir: Path, options: NodeOptions, *, timeout: float = 300.0) -> None:
        self._folder = state_dir / _FOLDER
        self._options = options
        self._timeout = timeout

    @contextlib.asynccontextmanager
    async def passed(self, root: Root) -> AsyncIterator[None]:
        """Wait for a slot of the image's gate, then of the node's, and hold both. Raises SandboxStartFailed."""
        async with contextlib.AsyncExitStack() as stack:
            if root.kind is not RootKind.HOST:
                key = hashlib.sha256((root.digest or root.path).encode()).hexdigest()[:16]
                what = f"the gate of image {root.path} ({self._options.starts_per_image} starts at a time)"
                await stack.enter_async_context(self._slot(f"image-{key}", self._options.starts_per_image, what))
            what = f"the gate of this node ({self._options.starts} starts at a time)"
            await stack.enter_async_context(self._slot("node", self._options.starts, what))
            yield

    @contextlib.asynccontextmanager
    async def _slot(self, name: str, slots: int, what: str) -> AsyncIterator[None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(self._timeout):
                held = await self._wait(name, slots)
        except TimeoutError:
            raise SandboxStartFailed(f"no turn at {what} within {self._timeout:g} s") from None
        try:
            yield
        finally:
            os.close(held)

    async def _wait(self, name: str, slots: int) -> int:
        pause = _FIRST_PAUSE
        while True:
            for number in range(slots):
                held = _try_lock(self._folder / f"{name}.{number}")
                if held is not None:
                    return held
            # Jittered, so that those who wait do not all look at the same moment.
            await asyncio.sleep(jittered(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)


def passes(error: SandboxStartFailed) -> bool:
    """Whether the same start may succeed a moment later."""
    return _PASSING.search(str(error)) is not None


def jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.5)  # noqa: S311


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
