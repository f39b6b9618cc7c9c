"""Sandboxes from Linux namespaces through bubblewrap: rootless, no daemon, the host's /usr read-only. No Django.

When the platform runs as root, sandboxes run as an unprivileged host user, so that neither file permissions nor process limits
make an exception for what runs inside. What binds show must be readable by that user, but may lie where it cannot go by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from sandboxes.backends import bwrap_program
from sandboxes.backends.bases import Bases
from sandboxes.backends.bundle import build_bundle
from sandboxes.backends.enforcement import find_enforcement, release
from sandboxes.backends.host_processes import Mark
from sandboxes.backends.launch import INTERPRETER, Host, launch, read_mark
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.roots.ready import check_directory
from sandboxes.backends.state import Place, StateDirectory
from sandboxes.errors import BackendUnavailable
from sandboxes.protocol import Root, RootKind, SandboxSpec


class BubblewrapBackend(StateDirectory):
    """Implements `sandboxes.protocol.Backend`."""

    name = "bubblewrap"
    _host: Host | None = None

    async def probe(self) -> Mapping[str, str]:
        host = await self._probe()
        facts = {"binary": host.bwrap, "version": host.version, "interpreter": INTERPRETER, "sif": self._bases.how_sif()}
        return {**facts, **host.enforcement.facts()}

    async def _check(self, spec: SandboxSpec, root: Root) -> None:
        host = await self._probe()
        bwrap_program.check_binds(spec.binds)
        if root.kind is RootKind.DIRECTORY:
            check_directory(root, spec.changes, host.user)

    @contextlib.asynccontextmanager
    async def _launched(self, place: Place, spec: SandboxSpec, root: Root) -> AsyncIterator[Mapping[str, str]]:
        host = await self._probe()
        async with self._bases.ready(root, spec.changes, host.bundle) as base:
            with launch(host, place, spec, base) as enforced:
                yield enforced

    def _mark(self, place: Place) -> Mark:
        return read_mark(place)

    def _release(self, place: Place) -> None:
        release(place)
        self._bases.sweep()

    @functools.cached_property
    def _bases(self) -> Bases:
        return Bases(self.state_dir)

    async def _probe(self) -> Host:
        if self._host is None:
            self._host = await asyncio.to_thread(_probe_host)
        return self._host


def _probe_host() -> Host:
    if not Path(INTERPRETER).exists():
        raise BackendUnavailable(f"{INTERPRETER} is missing: install the system's python3")
    user = sandbox_user()
    bwrap, version = bwrap_program.find_bwrap(user)
    return Host(bwrap, version, build_bundle(INTERPRETER), user, find_enforcement())
