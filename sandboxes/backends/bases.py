"""What the sandboxes of one state directory stand on, whichever backend starts them. No Django."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxes.backends.launch import INTERPRETER, Base
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.roots.ready import ready_root
from sandboxes.backends.roots.runtime import Runtime, build_runtime
from sandboxes.backends.roots.shared import SharedRoots
from sandboxes.backends.staging import shared_folder
from sandboxes.errors import BackendUnavailable
from sandboxes.protocol import Changes, Root, RootKind


class Bases:
    """Makes roots ready, and the runtime for those that are images."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._user = sandbox_user()
        self._runtime: Runtime | None = None

    def how_sif(self) -> str:
        """How SIF files are used here, as `SharedRoots.how` says it. Raises BackendUnavailable."""
        return self._shared.how()

    @contextlib.asynccontextmanager
    async def ready(self, root: Root, changes: Changes, bundle: bytes) -> AsyncIterator[Base]:
        """For the time of a start; `bundle` is the broker. Raises SandboxStartFailed, BackendUnavailable."""
        if root.kind is RootKind.HOST:
            yield Base()
            return
        if self._runtime is None or not self._runtime.is_there():
            self._runtime = await asyncio.to_thread(build_runtime, INTERPRETER, bundle, shared_folder())
        async with ready_root(root, changes, self._shared, self._user) as ready:
            yield Base(root, ready, self._runtime)

    def sweep(self) -> None:
        """Give back what no sandbox stands on any more. Blocks."""
        with contextlib.suppress(BackendUnavailable):  # the folder for it is not there, or not ours: neither is what is in it
            self._shared.sweep()

    @functools.cached_property
    def _shared(self) -> SharedRoots:
        folder = self._state_dir / ".roots" if self._user is None else shared_folder() / "roots"
        return SharedRoots(folder, self._user)
