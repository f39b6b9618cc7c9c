"""The backend. No Django."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from sandboxes.backends import bwrap_program
from sandboxes.backends.apptainer.arguments import container_of, prepared_image, writable_places
from sandboxes.backends.apptainer.files import make_work_folder, remove_work_folder
from sandboxes.backends.apptainer.instances import Instances
from sandboxes.backends.apptainer.launch import Entry, Host, launch
from sandboxes.backends.apptainer.processes import end_sandbox, first_process
from sandboxes.backends.apptainer.program import find_program
from sandboxes.backends.bases import Bases
from sandboxes.backends.bundle import build_bundle
from sandboxes.backends.enforcement import find_enforcement, release
from sandboxes.backends.host_processes import Mark, namespace_of
from sandboxes.backends.launch import INTERPRETER
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.roots.ready import check_directory
from sandboxes.backends.state import Place, StateDirectory, read_record
from sandboxes.errors import BackendUnavailable, TeardownFailed
from sandboxes.options import NodeOptions
from sandboxes.protocol import Root, RootKind, SandboxSpec

_ABANDON_TIMEOUT = 1.0  # what is left then, `stop` finds


class ApptainerBackend(StateDirectory):
    """Implements `sandboxes.protocol.Backend`."""

    name = "apptainer"
    _host: Host | None = None
    _instances: Instances | None = None

    async def probe(self) -> Mapping[str, str]:
        host = await self._probe()
        program = host.program
        version = program.version if program.product == self.name else f"{program.version} ({program.product})"
        facts = {"binary": program.path, "version": version, "interpreter": INTERPRETER}
        return {**facts, "sif": self._bases.how_sif(), **host.enforcement.facts(), **program.enforced()}

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
            async with self._bases.ready(root, spec.changes, host.bundle) as base:
                image = prepared_image(spec, base, host.bundle, host.user)
                container = container_of(host.program, spec, image, work)
                if self._instances is None:
                    start = [*container.program, "--quiet", "exec", "--pwd", bwrap_program.HOME]
                    entry = Entry([*start, *container.options, container.image], work)
                else:
                    entry = await self._instances.start(place, container, work)
                with launch(host, place, spec, base, entry, writable_places(spec, image)) as enforced:
                    yield enforced
        except BaseException:
            self._end(place, _ABANDON_TIMEOUT)
            raise

    async def stop(self, name: str) -> None:
        await self._find_instances()
        await super().stop(name)
        if self._instances is not None:
            left = await asyncio.to_thread(self._instances.end_stray, name, self._stop_timeout)
            if left:
                raise TeardownFailed(f"{name}: processes {left} are still there")
            await self._instances.check_gone(name)

    async def list(self) -> list[str]:
        await self._find_instances()
        names = await super().list()
        return names if self._instances is None else sorted({*names, *self._instances.strays()})

    def _end(self, place: Place, timeout: float) -> builtins.list[int]:
        left = [] if self._instances is None else self._instances.end(place, timeout)
        return left or end_sandbox(self._mark(place), timeout)

    def _release(self, place: Place) -> None:
        release(place)
        with contextlib.suppress(BackendUnavailable):  # the folder that it is in is not there, or not ours: nor is it
            remove_work_folder(place, sandbox_user())
        self._bases.sweep()

    def _mark(self, place: Place) -> Mark:
        pid = first_process(place.label)
        if pid is not None:
            return Mark(place.label, pid, namespace_of(pid))
        record = read_record(place.directory)  # its arguments are invisible while it ends
        return Mark(place.label, record.get("pid"), record.get("pid_namespace"))

    @functools.cached_property
    def _bases(self) -> Bases:
        return Bases(self.state_dir)

    async def _find_instances(self) -> None:
        """Nothing else of stopping needs the program, which may be gone."""
        if self._options.apptainer_instances:
            await self._probe()

    async def _probe(self) -> Host:
        if self._host is None:
            host = await asyncio.to_thread(_probe_host, self._options)
            if self._options.apptainer_instances:
                instances = Instances(self.state_dir, host.program, host.user)
                await instances.check()
                self._instances = instances
            self._host = host
        return self._host


def _probe_host(options: NodeOptions) -> Host:
    if not Path(INTERPRETER).exists():
        raise BackendUnavailable(f"{INTERPRETER} is missing: install the system's python3")
    user = sandbox_user()
    program = find_program(options.apptainer, user)
    return Host(program, build_bundle(INTERPRETER), user, find_enforcement())
