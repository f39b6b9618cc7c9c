"""Whether an image in the store is still what was built, and can be used. No Django."""

from __future__ import annotations

import asyncio
import secrets

from sandboxes.errors import SandboxError
from sandboxes.images.digest import read_contents
from sandboxes.images.store import Entry, Store
from sandboxes.protocol import Backend, Limits, SandboxSpec

_PREFIX = "verify-"
_SMOKE_SECONDS = 30.0
_SMOKE = "cat /etc/os-release >/dev/null 2>&1; cd / && ls >/dev/null && echo well"


async def verify(store: Store, digest: str, backend: Backend) -> list[str]:
    """What is wrong with it; nothing when all is well. Reads all of it, and starts a sandbox."""
    entry = store.find(digest)
    if entry is None:
        return [f"{store.folder} does not have it"]
    problems = []
    try:
        contents = await asyncio.to_thread(read_contents, entry.path, entry.format)
        if contents.digest != entry.digest:
            problems.append(f"its contents have changed: they have the digest {contents.digest}")
    except OSError as error:
        problems.append(f"{error.filename} cannot be read: {error.strerror}")
    try:
        problems += await _smoke(entry, backend)
    except SandboxError as error:
        problems.append(f"no sandbox can be started from it: {error}")
    return problems


def is_verification(sandbox: str) -> bool:
    """Whether a sandbox of this name is one that `verify` has started."""
    return sandbox.startswith(_PREFIX)


async def _smoke(entry: Entry, backend: Backend) -> list[str]:
    name = f"{_PREFIX}{secrets.token_hex(6)}"
    try:
        await backend.start(name, SandboxSpec(limits=Limits(), image=entry.digest), entry.root)
        session = await backend.connect(name)
        try:
            result = await session.bash(_SMOKE, timeout=_SMOKE_SECONDS)
        finally:
            await session.close()
    finally:
        await backend.stop(name)
    return [] if result.exit_code == 0 and "well" in result.output else [f"a command in it failed: {result.output[-300:]!r}"]
