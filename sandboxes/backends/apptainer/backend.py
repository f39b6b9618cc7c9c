"""The backend. No Django."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxes.backends import bwrap_program
from sandboxes.backends.apptainer.arguments import container_options
from sandboxes.backends.apptainer.files import make_work_folder, remove_work_folder
from sandboxes.backends.apptainer.image import prepared_image
from sandboxes.backends.apptainer.launch import launch
from sandboxes.backends.apptainer.processes import end_sandbox, first_process
from sandboxes.backends.apptainer.program import Program, find_program
from sandboxes.backends.bundle import build_bundle
from sandboxes.backends.enforcement import Enforcement, find_enforcement, release
from sandboxes.backends.host_processes import Mark, namespace_of
from sandboxes.backends.launch import INTERPRETER
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.staging import reachable
from sandboxes.backends.state import Place, StateDirectory, read_record
from sandboxes.errors import BackendUnavailable, SandboxStartFailed
from sandboxes.options import NodeOptions
from sandboxes.protocol import Root, RootKind, SandboxSpec

_ABANDON_TIMEOUT = 1.0  # what is left then, `stop` finds


@dataclass(frozen=True)
class _Host:
    """What this host has; constant for the life of the process."""

    program: Program
    bundle: bytes
    user: int | None  # host user of the sandboxes, None for our own
    enforcement: Enforcement


class ApptainerBackend(StateDirectory):
    """Implements `sandboxes.protocol.Backend`."""

    name = "apptainer"
    _host: _Host | None = None

    async def probe(self) -> Mapping[str, str]:
        host = await self._probe()
        program = host.program
        facts = {"binary": program.path, "version": f"{program.product} {program.version}", "interpreter": INTERPRETER}
        return {**facts, **host.enforcement.facts(), **program.enforced()}

    async def _check(self, spec: SandboxSpec, root: Root) -> None:
        await self._probe()
        bwrap_program.check_binds(spec.binds)
        if root.kind is not RootKind.HOST and not Path(root.path).exists():
            raise SandboxStartFailed(f"{root.path}: this image is not on this host")

    @contextlib.asynccontextmanager
    async def _launched(self, place: Place, spec: SandboxSpec, root: Root) -> AsyncIterator[Mapping[str, str]]:
        host = await self._probe()
        work = make_work_folder(place, host.user)
        image, binds = prepared_image(root, spec, host.bundle, host.user)
        binds |= {bind.target: bind.source if host.user is None else reachable(bind.source) for bind in spec.binds}
        options = container_options(host.program, spec, root.kind, binds, work)
        container = [*host.program.with_configuration(spec.limits.disk_mb), "--quiet", "exec", *options, image]
        try:
            with launch(place, spec, container, host.enforcement, host.user, work) as enforced:
                yield {**enforced, **host.program.enforced()}
        except BaseException:
            self._end(place, _ABANDON_TIMEOUT)
            raise

    def _release(self, place: Place) -> None:
        release(place)
        remove_work_folder(place, sandbox_user())

    def _end(self, place: Place, timeout: float) -> list[int]:
        return end_sandbox(self._mark(place), timeout)

    def _mark(self, place: Place) -> Mark:
        pid = first_process(place.label)
        if pid is not None:
            return Mark(place.label, pid, namespace_of(pid))
        record = read_record(place.directory)  # its arguments are invisible while it ends
        return Mark(place.label, record.get("pid"), record.get("pid_namespace"))

    async def _probe(self) -> _Host:
        if self._host is None:
            self._host = await asyncio.to_thread(_probe_host, self._options)
        return self._host


def _probe_host(options: NodeOptions) -> _Host:
    if not Path(INTERPRETER).exists():
        raise BackendUnavailable(f"{INTERPRETER} is missing: install the system's python3")
    user = sandbox_user()
    program = find_program(options.apptainer, user)
    return _Host(program, build_bundle(INTERPRETER), user, find_enforcement())
