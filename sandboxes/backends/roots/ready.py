"""From a `Root` to a directory that sandboxes can be started from. No Django."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.backends.roots.shared import Held, SharedRoots
from sandboxes.backends.staging import is_reachable
from sandboxes.errors import SandboxStartFailed
from sandboxes.protocol import Changes, Root, RootKind


@dataclass(frozen=True)
class ReadyRoot:
    """`descriptors` are open files that the first process of the sandbox must keep open for as long as it lives."""

    directory: Path
    descriptors: tuple[int, ...] = ()


def check_directory(root: Root, changes: Changes, user: int | None) -> None:
    """Raises SandboxStartFailed for a directory that sandboxes of the host user `user` (None: us) cannot use as their root."""
    path = Path(root.path)
    if not path.is_absolute() or not path.is_dir():
        raise SandboxStartFailed(f"{root.path!r} is not the absolute path of a directory on this host")
    if user is not None and not is_reachable(path / "x"):
        raise SandboxStartFailed(f"{path}: user {user}, as whom sandboxes run, cannot go there: chmod o+x it and all above it")
    owner, expected = path.stat().st_uid, os.geteuid() if user is None else user
    if owner != expected and changes is not Changes.REFUSED:
        raise SandboxStartFailed(
            f"{path} belongs to user {owner}: agents can change the files of user {expected} only; give them to it (chown -R)"
        )


@contextlib.asynccontextmanager
async def ready_root(root: Root, changes: Changes, shared: SharedRoots, user: int | None) -> AsyncIterator[ReadyRoot]:
    """`root`, which is not the host's, for the time of a start. Raises SandboxStartFailed."""
    if root.kind is RootKind.DIRECTORY:
        check_directory(root, changes, user)
        yield ReadyRoot(Path(root.path))
        return
    held = await _held(shared, root)
    try:
        yield ReadyRoot(held.directory, (held.fd,))
    finally:
        held.close()


async def _held(shared: SharedRoots, root: Root) -> Held:
    pending = asyncio.ensure_future(asyncio.to_thread(shared.hold, Path(root.path), root.digest))
    try:
        return await asyncio.shield(pending)
    except asyncio.CancelledError:
        pending.add_done_callback(_drop)  # a thread cannot be cancelled: what it comes back with is not wanted any more
        raise


def _drop(pending: asyncio.Future[Held]) -> None:
    if not pending.cancelled() and pending.exception() is None:
        pending.result().close()
