"""The backend. No Django."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from sandboxes.backends import bwrap_program
from sandboxes.backends.apptainer.files import make_work_folder, remove_work_folder
from sandboxes.backends.apptainer.launch import Host, launch
from sandboxes.backends.apptainer.processes import end_sandbox, first_process
from sandboxes.backends.apptainer.program import find_program
from sandboxes.backends.bundle import build_bundle
from sandboxes.backends.enforcement import find_enforcement, release
from sandboxes.backends.host_processes import Mark, namespace_of
from sandboxes.backends.launch import INTERPRETER, Base
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.roots.ready import check_directory, ready_root
from sandboxes.backends.roots.runtime import Runtime, build_runtime
from sandboxes.backends.roots.shared import SharedRoots
from sandboxes.backends.staging import shared_folder
from sandboxes.backends.state import Place, StateDirectory, read_record
from sandboxes.errors import BackendUnavailable
from sandboxes.options import NodeOptions
from sandboxes.protocol import Root, RootKind, SandboxSpec

_ABANDON_TIMEOUT = 1.0  # what is left then, `stop` finds


class ApptainerBackend(StateDirectory):
    """Implements `sandboxes.protocol.Backend`."""

    name = "apptainer"
    _host: Host | None = None
    _runtime: Runtime | None = None

    async def probe(self) -> Mapping[str, str]:
        host = await self._probe()
        program = host.program
        facts = {"binary": program.path, "version": f"{program.product} {program.version}", "interpreter": INTERPRETER}
        return {**facts, "sif": self._shared.how(), **host.enforcement.facts(), **program.enforced()}

    async def _check(self, spec: SandboxSpec, root: Root) -> None:
        host = await self._probe()
        bwrap_program.check_binds(spec.binds)
        if root.kind is RootKind.DIRECTORY:
            check_directory(root, spec.changes, host.user)

    @contextlib.asynccontextmanager
    async def _launched(self, place: Place, spec: SandboxSpec, root: Root) -> AsyncIterator[Mapping[str, str]]:
        host = await self._probe()
        work = make_work_folder(place, host.user)
        try:
            async with self._base(host, spec, root) as base:
                with launch(host, place, spec, base, work) as enforced:
                    yield enforced
        except BaseException:
            self._end(place, _ABANDON_TIMEOUT)
            raise

    @contextlib.asynccontextmanager
    async def _base(self, host: Host, spec: SandboxSpec, root: Root) -> AsyncIterator[Base]:
        if root.kind is RootKind.HOST:
            yield Base()
            return
        if self._runtime is None or not self._runtime.is_there():
            self._runtime = await asyncio.to_thread(build_runtime, INTERPRETER, host.bundle, shared_folder())
        async with ready_root(root, spec.changes, self._shared, host.user) as ready:
            yield Base(root, ready, self._runtime)

    def _end(self, place: Place, timeout: float) -> list[int]:
        return end_sandbox(self._mark(place), timeout)

    def _release(self, place: Place) -> None:
        release(place)
        remove_work_folder(place, sandbox_user())
        self._shared.sweep()

    def _mark(self, place: Place) -> Mark:
        pid = first_process(place.label)
        if pid is not None:
            return Mark(place.label, pid, namespace_of(pid))
        record = read_record(place.directory)  # its arguments are invisible while it ends
        return Mark(place.label, record.get("pid"), record.get("pid_namespace"))

    @functools.cached_property
    def _shared(self) -> SharedRoots:
        user = sandbox_user()
        return SharedRoots(self.state_dir / ".roots" if user is None else shared_folder() / "roots", user)

    async def _probe(self) -> Host:
        if self._host is None:
            self._host = await asyncio.to_thread(_probe_host, self._options)
        return self._host


def _probe_host(options: NodeOptions) -> Host:
    if not Path(INTERPRETER).exists():
        raise BackendUnavailable(f"{INTERPRETER} is missing: install the system's python3")
    user = sandbox_user()
    program = find_program(options.apptainer, user)
    return Host(program, build_bundle(INTERPRETER), user, find_enforcement())
