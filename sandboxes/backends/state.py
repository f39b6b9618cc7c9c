"""What every backend keeps of its sandboxes on the host, and what it does with them whatever they are made of. No Django.

A sandbox has a private directory STATE_DIR/NAME, mode 0700: the broker's socket, `sandbox.json` (its record) and `log` (what
the launcher and the broker print; empty when all is well). Its name may change, its label never does: what lives outside of
the directory is called by the label.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes import channel
from sandboxes.backends import host_processes
from sandboxes.backends.cgroups import was_killed_for_memory
from sandboxes.backends.gates import RETRY_PAUSES, StartGates, jittered, passes
from sandboxes.errors import (
    BackendUnavailable,
    LimitExceeded,
    SandboxError,
    SandboxExists,
    SandboxLost,
    SandboxStartFailed,
    TeardownFailed,
)
from sandboxes.network.policy import check_policy
from sandboxes.options import NodeOptions
from sandboxes.protocol import HOST, Root, SandboxInfo, SandboxSpec
from sandboxes.session import BrokerSession

LOG = "log"

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RECORD = "sandbox.json"
_LOG_TAIL = 2000


@dataclass(frozen=True)
class Place:
    """Where a sandbox that is being started keeps its files, and the label that its processes carry in their arguments."""

    directory: Path
    label: str

    @property
    def name(self) -> str:
        """For messages; it may have another one later."""
        return self.directory.name


class StateDirectory(abc.ABC):
    """The common part of all backends; implements `sandboxes.protocol.Backend` but for what a sandbox is made of.

    `state_dir` is private to one user, and shared by all processes of a node.
    """

    name: str

    def __init__(
        self,
        state_dir: Path,
        options: NodeOptions | None = None,
        *,
        start_timeout: float = 15.0,
        stop_timeout: float = 5.0,
    ) -> None:
        self.state_dir = state_dir
        self._options = options or NodeOptions()
        self._gates = StartGates(state_dir, self._options)
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout

    # For each backend to fill in.

    @abc.abstractmethod
    async def probe(self) -> Mapping[str, str]: ...

    @abc.abstractmethod
    async def _check(self, spec: SandboxSpec, root: Root) -> None:
        """Raise BackendUnavailable, or SandboxStartFailed for what this host or backend cannot do. Nothing is made yet."""

    @abc.abstractmethod
    def _launched(self, place: Place, spec: SandboxSpec, root: Root) -> AbstractAsyncContextManager[Mapping[str, str]]:
        """Start the sandbox detached, and give how its limits are enforced; the block waits for the broker.

        Every process started carries the label in its arguments from its first moment on. When the block raises, or is
        cancelled, they are ended. Raises SandboxStartFailed.
        """

    @abc.abstractmethod
    def _mark(self, place: Place) -> host_processes.Mark:
        """How to recognise its processes, also of one that was half started. Blocks, shortly."""

    def _end(self, place: Place, timeout: float) -> list[int]:
        """Kill all its processes and return the pids of those that are still there after `timeout` seconds. Blocks."""
        return host_processes.end_marked(self._mark(place), timeout)

    def _release(self, place: Place) -> None:  # noqa: B027 - not every backend has something to give back
        """Give back what the sandbox had outside of its directory, now that its processes are gone. Blocks; may come twice."""

    # The same for all.

    async def start(self, name: str, spec: SandboxSpec, root: Root = HOST) -> SandboxInfo:
        directory = self._directory(name)
        check_policy(spec.network, full_permitted=self._options.full_network)
        await self._check(spec, root)
        try:
            return await self._start_anew(directory, spec, root)
        except OSError as error:  # a full disk, no more descriptors: another start would fail as well
            raise BackendUnavailable(f"no sandbox can be started in {self.state_dir}: {error}") from error

    async def _start_anew(self, directory: Path, spec: SandboxSpec, root: Root) -> SandboxInfo:
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _claim(directory)
        place = Place(directory, f"prorl-sandbox-{secrets.token_hex(8)}")
        # Written before there is a process: whatever happens from here on, `stop` knows what to look for.
        _write_record(directory, {"label": place.label})
        for pause in RETRY_PAUSES:
            try:
                return await self._start(place, spec, root)
            except SandboxStartFailed as error:
                if not passes(error):
                    raise
                logger.warning("sandbox start failed; trying again: %s", error)
            await asyncio.sleep(jittered(pause))
            await asyncio.to_thread(self._begin_again, place)
        return await self._start(place, spec, root)

    async def _start(self, place: Place, spec: SandboxSpec, root: Root) -> SandboxInfo:
        async with self._gates.passed(root), self._launched(place, spec, root) as enforced:
            await self._until_it_answers(place)
            mark = self._mark(place)
            if mark.pid is None:
                raise SandboxStartFailed(f"{place.name}: its first process was not reported")
            started_at = time.time()
            record = {"label": place.label, "pid": mark.pid, "pid_namespace": mark.namespace, "started_at": started_at}
            _write_record(place.directory, {**record, "enforced": dict(enforced)})
        return SandboxInfo(place.name, self.name, mark.pid, started_at, enforced)

    def _begin_again(self, place: Place) -> None:
        """After a start that failed: only the record stays."""
        left = self._end(place, self._stop_timeout)
        if left:
            raise SandboxStartFailed(f"{place.name}: processes {left} of a start that failed are still there")
        self._release(place)
        for path in place.directory.iterdir():
            if path.is_dir():
                remove_tree(path)
            elif path.name != _RECORD:
                path.unlink()

    async def connect(self, name: str) -> BrokerSession:
        try:
            peer = channel.connect(self._directory(name))
        except OSError as error:
            if was_killed_for_memory(self._directory(name)):
                raise LimitExceeded("memory_mb", f"{name}: the kernel ended it when its memory was used up") from None
            raise SandboxLost(f"{name}: {error}") from None
        return await BrokerSession.open(name, peer)

    async def rename(self, name: str, new_name: str) -> None:
        directory, target = self._directory(name), self._directory(new_name)
        if not (directory / _RECORD).exists():
            raise SandboxLost(f"{name}: there is no sandbox of this name")
        try:
            _claim(target)
            directory.rename(target)  # over the empty directory that claimed the name
        except OSError as error:
            with contextlib.suppress(OSError):
                target.rmdir()
            raise SandboxLost(f"{name}: {error}") from None

    async def stop(self, name: str) -> None:
        directory = self._directory(name)
        label = read_record(directory).get("label")
        place = None if label is None else Place(directory, label)
        await asyncio.to_thread(self._stop, directory, place)

    def _stop(self, directory: Path, place: Place | None) -> None:
        if place is not None:
            left = self._end(place, self._stop_timeout)
            if left:
                raise TeardownFailed(f"{directory.name}: processes {left} are still there", left)
            self._release(place)
        remove_tree(directory)

    async def list(self) -> list[str]:
        if not self.state_dir.is_dir():
            return []
        return sorted(entry.name for entry in self.state_dir.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name))

    def _directory(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a sandbox name: {name!r}")
        return self.state_dir / name

    async def _until_it_answers(self, place: Place) -> None:
        try:
            async with asyncio.timeout(self._start_timeout):
                session = await self.connect(place.name)
                try:
                    await session.ping()
                finally:
                    await session.close()
        except (SandboxError, TimeoutError) as error:
            log = (place.directory / LOG).read_text(errors="replace")[-_LOG_TAIL:].strip()
            raise SandboxStartFailed(f"{place.name}: {log or str(error) or 'no answer in time'}") from error


def remove_tree(directory: Path) -> None:
    """Remove a directory that a sandbox may have written to. Fine when it is gone, or is being removed by somebody else."""
    opened = False
    while directory.exists():
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            continue
        except PermissionError:
            if opened:
                raise
            # Directories of mode 000: overlayfs makes one for itself, an agent may make others.
            for parent, names, _ in os.walk(directory):
                for path in (Path(parent, name) for name in names):
                    if not path.is_symlink():
                        path.chmod(0o700)
            opened = True


def _claim(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        raise SandboxExists(f"{directory.name}: there is a sandbox of this name") from None


def _write_record(directory: Path, record: Mapping[str, Any]) -> None:
    temporary = directory / f"{_RECORD}.new"
    temporary.write_text(json.dumps(record))
    temporary.replace(directory / _RECORD)


def read_record(directory: Path) -> dict[str, Any]:
    """What is recorded; nothing when the start was interrupted before there could be a process."""
    try:
        record: dict[str, Any] = json.loads((directory / _RECORD).read_text())
    except FileNotFoundError:
        return {}
    except ValueError:  # the host went down before it was on its disk, and with it whatever ran
        return {}
    return record
