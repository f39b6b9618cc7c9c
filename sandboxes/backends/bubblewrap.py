"""Sandboxes from Linux namespaces through bubblewrap: rootless, no daemon, the host's /usr read-only. No Django.

Of each sandbox the host keeps a directory STATE_DIR/NAME, mode 0700: the broker's socket, `sandbox.json` and `log` (what
bubblewrap and the broker print; empty when all is well). When the platform runs as root, sandboxes run as an unprivileged host
user, so that neither file permissions nor process limits make an exception for what runs inside. What binds show must be
readable by that user, but may lie where it cannot go by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sandboxes import channel
from sandboxes.backends import bwrap_program, host_processes
from sandboxes.backends.bundle import build_bundle
from sandboxes.backends.launch import INTERPRETER, LOG, Host, launch, read_mark
from sandboxes.backends.seccomp import build_filter
from sandboxes.errors import BackendUnavailable, SandboxError, SandboxExists, SandboxLost, SandboxStartFailed, TeardownFailed
from sandboxes.protocol import SandboxInfo, SandboxSpec
from sandboxes.session import BrokerSession

_UNPRIVILEGED_USER = 65534
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RECORD = "sandbox.json"


class BubblewrapBackend:
    """Implements `sandboxes.protocol.Backend`; `state_dir` is private to one user, and shared by all processes of a node."""

    name = "bubblewrap"

    def __init__(self, state_dir: Path, *, start_timeout: float = 15.0, stop_timeout: float = 5.0) -> None:
        self.state_dir = state_dir
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._host: Host | None = None

    async def probe(self) -> Mapping[str, str]:
        host = await self._probe()
        facts = {"binary": host.bwrap, "version": host.version, "interpreter": INTERPRETER}
        facts["system_calls"] = "seccomp" if host.seccomp else "none"
        return {**facts, **host.enforced}

    async def start(self, name: str, spec: SandboxSpec) -> SandboxInfo:
        host = await self._probe()
        bwrap_program.check_binds(spec.binds)
        directory = self._directory(name)
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            raise SandboxExists(f"{name}: there is a sandbox of this name") from None
        label = f"prorl-sandbox-{secrets.token_hex(8)}"
        # Written before there is a process: whatever happens from here on, `stop` knows what to look for.
        _write_record(directory, {"label": label})
        with launch(host, directory, label, spec):
            try:
                async with asyncio.timeout(self._start_timeout):
                    session = await self.connect(name)
                    try:
                        await session.ping()
                    finally:
                        await session.close()
            except (SandboxError, TimeoutError) as error:
                log = (directory / LOG).read_text(errors="replace")[-2000:].strip()
                raise SandboxStartFailed(f"{name}: {log or str(error) or 'no answer in time'}") from error
            mark = read_mark(directory, label)
            if mark.pid is None:
                raise SandboxStartFailed(f"{name}: bubblewrap did not report its process")
            info = SandboxInfo(name=name, backend=self.name, pid=mark.pid, started_at=time.time(), enforced=host.enforced)
            _write_record(directory, {"label": label, "pid_namespace": mark.namespace, **asdict(info)})
        return info

    async def connect(self, name: str) -> BrokerSession:
        try:
            peer = channel.connect(self._directory(name))
        except OSError as error:
            raise SandboxLost(f"{name}: {error}") from None
        return await BrokerSession.open(name, peer)

    async def stop(self, name: str) -> None:
        directory = self._directory(name)
        label = _read_record(directory).get("label")
        if label is not None:
            left = await asyncio.to_thread(host_processes.end_marked, read_mark(directory, label), self._stop_timeout)
            if left:
                raise TeardownFailed(f"{name}: processes {left} are still there")
        with contextlib.suppress(FileNotFoundError):  # removed by a concurrent stop
            shutil.rmtree(directory)

    async def list(self) -> list[str]:
        if not self.state_dir.is_dir():
            return []
        return sorted(entry.name for entry in self.state_dir.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name))

    def _directory(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a sandbox name: {name!r}")
        return self.state_dir / name

    async def _probe(self) -> Host:
        if self._host is None:
            self._host = await asyncio.to_thread(_probe_host)
        return self._host


def _probe_host() -> Host:
    if not Path(INTERPRETER).exists():
        raise BackendUnavailable(f"{INTERPRETER} is missing: install the system's python3")
    user = _UNPRIVILEGED_USER if os.geteuid() == 0 else None
    bwrap, version = bwrap_program.find_bwrap(user)
    kernel = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    enforced = {
        "memory_mb": "rlimit, per process",
        "processes": "rlimit, per sandbox" if kernel >= (5, 14) else "rlimit, per host user",
        "file_size_mb": "rlimit",
        "disk_mb": "tmpfs size",
        "open_files": "rlimit, per process",
        "output_bytes": "broker",
    }
    return Host(bwrap, version, build_bundle(INTERPRETER), build_filter(), user, enforced)


def _write_record(directory: Path, record: Mapping[str, Any]) -> None:
    temporary = directory / f"{_RECORD}.new"
    temporary.write_text(json.dumps(record))
    temporary.replace(directory / _RECORD)


def _read_record(directory: Path) -> dict[str, Any]:
    """What is recorded; nothing when the start was interrupted before there could be a process."""
    try:
        record: dict[str, Any] = json.loads((directory / _RECORD).read_text())
    except FileNotFoundError:
        return {}
    return record
