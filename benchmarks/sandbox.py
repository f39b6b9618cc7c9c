"""Sandboxes: commands and cells beside other ways to run them, starts beside the bare programs, warm ones, and many at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import sandbox_peers
from benchmarks.platform import scratch_folder
from benchmarks.report import Figure, Machine, conclude, say, table
from sandboxes.backends.apptainer.program import find_program, process_options
from sandboxes.backends.bwrap_program import find_bwrap
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.errors import BackendUnavailable
from sandboxes.options import NodeOptions
from sandboxes.pool import WarmPool
from sandboxes.protocol import HOST, Backend, Root, SandboxSpec, Session
from sandboxes.registry import get_backend
from sandboxes.selfcheck.samples import directory_root, sif_root

ROUND_TRIPS = 2000
SLOW_ROUND_TRIPS = 30  # of what takes milliseconds
STARTS = 40
AT_ONCE = 50
WARM_ROUNDS = 40

_TIMEOUT = 60.0


class Times(NamedTuple):
    """Milliseconds."""

    p50: float
    p95: float


def main() -> int:
    logging.disable(logging.ERROR)  # SWE-ReX logs each request
    return asyncio.run(_main())


async def _main() -> int:
    machine = Machine()
    figures: list[Figure] = []
    with scratch_folder() as folder:
        for name in ("bubblewrap", "apptainer"):
            backend = get_backend(name, folder / name, NodeOptions(starts=8, starts_per_image=8))
            try:
                await backend.probe()
            except BackendUnavailable as error:
                say(f"without {name}: {error}")
                continue
            figures += await _round_trips(backend, machine)
            figures += await _starts(backend, folder, machine)
            figures += await _warm(backend, machine)
            figures += await _many(backend, machine)
    return conclude("sandbox", figures, machine)


# --- Commands and cells ------------------------------------------------------------------------------------------------------


async def _round_trips(backend: Backend, machine: Machine) -> list[Figure]:
    """`true` and the cell `1`, and beside them other ways to run `true`."""
    async with _sandbox(backend, HOST) as session:
        ours = await _measure(lambda: session.bash("true", timeout=_TIMEOUT), ROUND_TRIPS)
        cell = await _measure(lambda: session.python("1", timeout=_TIMEOUT), ROUND_TRIPS)
    machine.sample()
    rows: list[tuple[object, ...]] = [("`true`: ours", *ours, ""), ("the cell `1`: ours", *cell, "")]
    figures = [
        Figure(f"{backend.name}: `true`, p50", ours.p50, "ms", 0.3),
        Figure(f"{backend.name}: cell `1`, p50", cell.p50, "ms"),
    ]
    for what, opened in _other_ways(backend).items():
        try:
            async with opened as run_true:
                times = await _measure(run_true, SLOW_ROUND_TRIPS)
        except Exception as error:  # another one's defect is no reason to lose our figures
            say(f"without {what}: {type(error).__name__}: {error}")
            continue
        rows.append((f"`true`: {what}", *times, f"{times.p50 / ours.p50:.0f}"))
        figures.append(Figure(f"{backend.name}: times ours, {what}", times.p50 / ours.p50, ""))
    machine.sample()
    table(f"{backend.name}: commands and cells", ["", "p50 ms", "p95 ms", "times ours"], rows)
    return figures


def _other_ways(backend: Backend) -> dict[str, contextlib.AbstractAsyncContextManager[sandbox_peers.RunTrue]]:
    exec_per_command = sandbox_peers.exec_per_command(*_bare(backend, directory_root()))
    return {
        f"a bare {backend.name} for each": contextlib.nullcontext(exec_per_command),
        "a shell in tmux": sandbox_peers.tmux_session(),
        "SWE-ReX, local runtime": sandbox_peers.swe_rex_local(),
        "SWE-ReX, remote runtime": sandbox_peers.swe_rex_remote(),
    }


# --- Starts ------------------------------------------------------------------------------------------------------------------


async def _starts(backend: Backend, folder: Path, machine: Machine) -> list[Figure]:
    """From the call to a broker that answers, in turns with the bare program running `:` in the same image."""
    figures, rows = [], []
    for root in (HOST, directory_root(), sif_root()):
        await _start_and_stop(backend, root)  # what is kept for all sandboxes of an image is made by the first
        command, options = _bare(backend, directory_root() if root is HOST else root)
        ready, bare = [], []
        for _ in range(STARTS):
            ready.append(await _start_and_stop(backend, root))
            begun = time.perf_counter()
            await sandbox_peers.run_program(*command, "/bin/sh", "-c", ":", **options)
            bare.append(time.perf_counter() - begun)
        machine.sample()
        ours, theirs = _times(ready), _times(bare)
        rows.append((root.kind.value, *ours, *theirs, f"{ours.p50 / theirs.p50:.2f}"))
        target = 25.0 if backend.name == "bubblewrap" else None
        figures.append(Figure(f"{backend.name}: ready, {root.kind.value}, p50", ours.p50, "ms", target))
        if backend.name == "apptainer":
            figures.append(Figure(f"{backend.name}: ready over bare exec, {root.kind.value}", ours.p50 / theirs.p50, "", 1.3))
    table(f"{backend.name}: starts", ["image", "ready p50 ms", "p95", "bare p50 ms", "p95", "ratio"], rows)
    return figures


async def _start_and_stop(backend: Backend, root: Root) -> float:
    """Seconds until it answered."""
    name = _new_name()
    begun = time.perf_counter()
    try:
        await backend.start(name, SandboxSpec(), root)
        return time.perf_counter() - begun
    finally:
        await backend.stop(name)


def _bare(backend: Backend, root: Root) -> tuple[list[str], dict[str, object]]:
    """The bare program's command for something in `root`, with comparable isolation, and the options of the process."""
    user = sandbox_user()
    if backend.name == "apptainer":
        program = find_program("", user)
        isolated = ["--containall", "--no-home", "--net", "--network", "none", "--writable-tmpfs", root.path]
        return [program.path, "--quiet", "exec", *isolated], process_options(user, Path("/var/tmp"))  # noqa: S108
    path, _ = find_bwrap(user)
    # A SIF file it cannot start: the same directory without the mount is what it does at best.
    return [path, "--bind", directory_root().path, "/", "--proc", "/proc", "--dev", "/dev", "--unshare-all"], {"user": user}


# --- Warm sandboxes ----------------------------------------------------------------------------------------------------------


class _NoLedger:
    """The database's part is measured with the platform; here it is the sandboxes'."""

    async def started(self, name: str, image: str) -> None: ...

    async def ready(self, name: str, enforced: Mapping[str, str]) -> None: ...

    async def released(self, name: str) -> None: ...

    async def stopped(self, name: str, reason: str) -> None: ...


async def _warm(backend: Backend, machine: Machine) -> list[Figure]:
    pool = WarmPool(backend, _NoLedger())
    task = asyncio.create_task(pool.run())
    spec = SandboxSpec(env={"PRORL_TASK": "warm"})
    taken: list[float] = []
    cold: list[float] = []
    try:
        await pool.take("first", spec, HOST, target=2)
        while len(taken) < WARM_ROUNDS:
            while pool.sizes != {"": 2}:
                await asyncio.sleep(0.01)
            name = _new_name()
            begun = time.perf_counter()
            info = await pool.take(name, spec, HOST, target=2)
            taken.append(time.perf_counter() - begun)
            assert info is not None
            await backend.stop(name)
            while pool.sizes != {"": 2}:  # so that nothing else is being started
                await asyncio.sleep(0.01)
            cold.append(await _start_and_stop(backend, HOST))
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    machine.sample()
    warm, start = _times(taken), _times(cold)
    table(f"{backend.name}: warm", ["", "p50 ms", "p95 ms"], [("hand-over", *warm), ("start", *start)])
    return [
        Figure(f"{backend.name}: warm hand-over, p50", warm.p50, "ms", 5.0),
        Figure(f"{backend.name}: a start over a warm hand-over", start.p50 / warm.p50, ""),
    ]


# --- Many at once ------------------------------------------------------------------------------------------------------------


async def _many(backend: Backend, machine: Machine) -> list[Figure]:
    names = [_new_name() for _ in range(AT_ONCE)]
    ready: list[float] = []
    begun = time.perf_counter()

    async def start(name: str) -> None:
        await backend.start(name, SandboxSpec())
        ready.append(time.perf_counter() - begun)

    try:
        await asyncio.gather(*(start(name) for name in names))
        started = time.perf_counter() - begun
    finally:
        begun = time.perf_counter()
        await asyncio.gather(*(backend.stop(name) for name in names))
        stopped = time.perf_counter() - begun
    machine.sample()
    row = (AT_ONCE, statistics.median(ready), started, stopped)
    table(f"{backend.name}: at once", ["sandboxes", "p50 ready s", "all ready s", "all stopped s"], [row])
    return [
        Figure(f"{backend.name}: {AT_ONCE} at once, all ready", started, "s"),
        Figure(f"{backend.name}: {AT_ONCE} at once, all stopped", stopped, "s"),
    ]


# --- Common ------------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _sandbox(backend: Backend, root: Root) -> AsyncIterator[Session]:
    name = _new_name()
    try:
        await backend.start(name, SandboxSpec(), root)
        session = await backend.connect(name)
        yield session
        await session.close()
    finally:
        await backend.stop(name)


async def _measure(call: Callable[[], Awaitable[object]], times: int) -> Times:
    await call()
    seconds = []
    gc.disable()  # our collector's pauses are not the sandbox's
    try:
        for _ in range(times):
            begun = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - begun)
    finally:
        gc.enable()
    return _times(seconds)


def _times(seconds: list[float]) -> Times:
    quantiles = statistics.quantiles(seconds, n=20)
    return Times(statistics.median(seconds) * 1000, quantiles[-1] * 1000)


def _new_name() -> str:
    return f"bench-{secrets.token_hex(6)}"


if __name__ == "__main__":
    sys.exit(main())
