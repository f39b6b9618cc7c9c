"""What takes more than all of a sandbox may take: it is ended, the result says for which limit, and the sandbox goes on."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxes.errors import LimitExceeded
from sandboxes.protocol import Changes, CommandResult, Limits, PythonResult, SandboxSpec, Session
from sandboxes.selfcheck.framework import (
    Bench,
    CheckFailed,
    check,
    expect,
    expect_equal,
    expect_output,
    host_processes_with,
    marker,
    value_of,
)
from sandboxes.selfcheck.samples import directory_root

_MIB = 1024 * 1024
_LARGEST_FACTOR = 2  # of the memory limit, that such a hog may hold for a moment

# Two processes, each of which takes what one may have.
_MEMORY_HOG = """
import os, time
os.fork()
held = []
while True:
    try:
        held.append(b"x" * (4 << 20))
    except MemoryError:
        pass
    time.sleep(0.02)
"""

_MEMORY_FILES = """
import os
held = []
while True:
    held.append(os.memfd_create("hog"))
    for _ in range(16):
        os.write(held[-1], b"x" * (1 << 20))
"""

_FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

_SHARING = """
import os, time
data = b"x" * (80 << 20)
children = []
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        time.sleep(1)
        os._exit(sum(data[:: 1 << 12]) == 0)
    children.append(pid)
print([os.waitpid(pid, 0)[1] for pid in children])
"""


def _expect_limit(result: CommandResult | PythonResult, limit: str) -> None:
    expect_equal(result.limit_exceeded, limit, f"the limit in {result}")
    if isinstance(result, CommandResult):
        expect_equal(result.exit_code, None, "the exit code")


async def _expect_works(session: Session) -> None:
    expect_output(await session.bash("echo back", timeout=20), "back\n")
    expect_equal(await value_of(session, "1 + 1"), 2, "a cell's value")


async def _all_gone(text: str) -> None:
    for _ in range(200):
        if not host_processes_with(text):
            return
        await asyncio.sleep(0.05)
    raise CheckFailed(f"processes {host_processes_with(text)} are still there")


async def _limit_of_a_later_command(session: Session) -> str:
    try:
        async with asyncio.timeout(60):
            while not (limit := (await session.bash("sleep 0.1", timeout=20)).limit_exceeded):
                pass
            return limit
    except TimeoutError:
        raise CheckFailed("no later command says that a limit was exceeded") from None


@contextlib.asynccontextmanager
async def _peak_memory(text: str) -> AsyncIterator[list[int]]:
    """The most memory, in bytes, that processes with `text` in their arguments held together; known after the block."""
    peak: list[int] = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], sum(_private_bytes(pid) for pid in host_processes_with(text)))

    watching = asyncio.create_task(asyncio.to_thread(watch))
    try:
        yield peak
    finally:
        ended.set()
        await watching


def _private_bytes(pid: int) -> int:
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


@check("processes that together hold too much memory are ended soon; the sandbox goes on")
async def memory_of_many_processes(bench: Bench) -> None:
    limits = Limits(memory_mb=256)
    text = marker()
    async with bench.sandbox(SandboxSpec(limits=limits)) as session:
        await session.write_file("hog.py", _MEMORY_HOG.encode())
        async with _peak_memory(text) as peak:
            _expect_limit(await session.bash(f"python3 ~/hog.py {text}", timeout=60), "memory_mb")
        expect(peak[0] < _LARGEST_FACTOR * limits.memory_mb * _MIB, f"it held {peak[0] // _MIB} MiB for a moment")
        await _expect_works(session)


@check("memory that an earlier command's processes take in the background is noticed; the next command says so")
async def memory_in_the_background(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(memory_mb=256))) as session:
        await session.write_file("hog.py", _MEMORY_HOG.encode())
        expect_equal((await session.bash("python3 ~/hog.py >/dev/null 2>&1 &", timeout=20)).exit_code, 0, "the exit code")
        expect_equal(await _limit_of_a_later_command(session), "memory_mb", "the limit")
        await _expect_works(session)


@check("memory in files that have no name counts")
async def memory_in_nameless_files(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(memory_mb=256))) as session:
        _expect_limit(await session.python(_MEMORY_FILES, timeout=60), "memory_mb")
        await _expect_works(session)


@check("what is written to the file system counts as memory where it is memory, and is bounded where it is not")
async def memory_in_files(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(memory_mb=128, disk_mb=512))) as session:
        result = await session.bash("for i in $(seq 70); do head -c 10M /dev/zero > /tmp/$i; sleep 0.02; done", timeout=60)
        expect(result.limit_exceeded in ("memory_mb", "disk_mb"), f"the result is {result}")
        await _expect_works(session)


@check("memory that processes share is counted once")
async def shared_memory_counts_once(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(memory_mb=300))) as session:
        await session.write_file("sharing.py", _SHARING.encode())
        result = await session.bash("python3 ~/sharing.py", timeout=60)
        expect_output(result, f"{[0] * 10}\n")


@check("a fork bomb is ended; the broker answers meanwhile, and the sandbox goes on")
async def fork_bomb(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(processes=40))) as session:
        await session.write_file("bomb.py", _FORK_BOMB.encode())
        bomb = asyncio.create_task(session.bash("python3 ~/bomb.py", timeout=60))
        while not bomb.done():
            expect(await session.ping() < 5, "the broker is slow")
            await asyncio.sleep(0.1)
        _expect_limit(await bomb, "processes")
        await _expect_works(session)
        result = await session.bash("grep -l '[b]omb.py' /proc/[0-9]*/cmdline 2>/dev/null", timeout=20)
        expect_equal(result.output, "", "the list of surviving processes")


@check("a fork bomb in the background is ended; the next command says so")
async def fork_bomb_in_the_background(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(processes=40))) as session:
        await session.write_file("bomb.py", _FORK_BOMB.encode())
        await session.bash("(setsid python3 ~/bomb.py >/dev/null 2>&1 &)", timeout=20)
        expect_equal(await _limit_of_a_later_command(session), "processes", "the limit")
        await _expect_works(session)


@check("whoever fills the home or /tmp is told; what was written can be removed, and then there is room again")
async def disk_filler(bench: Bench) -> None:
    for directory in ("/tmp", "~"):
        async with bench.sandbox(SandboxSpec(limits=Limits(disk_mb=16))) as session:
            fill = f"while :; do head -c 1M /dev/zero >> {directory}/full 2>/dev/null; sleep 0.01; done"
            _expect_limit(await session.bash(fill, timeout=60), "disk_mb")
            removed = await session.bash(f"rm {directory}/full; echo text > {directory}/new; cat {directory}/new", timeout=20)
            expect_output(removed, "text\n")
            await _expect_works(session)


@check("whoever changes too much in an image is told, be the changes in memory or on disk, also in files that have no name")
async def image_filler(bench: Bench) -> None:
    append = "while :; do head -c 1M /dev/zero >> /srv/full 2>/dev/null; sleep 0.01; done"
    nameless = "exec 7> /srv/full; rm /srv/full; head -c 64M /dev/zero >&7; sleep 60"
    for changes, fill in ((Changes.MEMORY, append), (Changes.DISK, append), (Changes.DISK, nameless)):
        spec = SandboxSpec(limits=Limits(disk_mb=16), changes=changes)
        async with bench.sandbox(spec, root=directory_root()) as session:
            _expect_limit(await session.bash(fill, timeout=60), "disk_mb")
            await _expect_works(session)


@check("a short command that fills the disk is told as well")
async def short_disk_filler(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(disk_mb=16))) as session:
        result = await session.bash("head -c 32M /dev/zero > /tmp/full; sleep 0.5; ls /tmp", timeout=20)
        _expect_limit(result, "disk_mb")
        await _expect_works(session)


@check("a command or a cell that prints without end is ended; the sandbox goes on")
async def flood(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(flood_mb=4, output_bytes=2000))) as session:
        result = await session.bash("yes", timeout=60)
        _expect_limit(result, "flood_mb")
        expect(len(result.output) < 3000, f"{len(result.output)} characters were returned")
        expect(result.truncated_bytes >= 4 * _MIB - 3000, f"only {result.truncated_bytes} bytes are said to be missing")
        _expect_limit(await session.python("while True: print('x' * 1000)", timeout=60), "flood_mb")
        _expect_limit(await session.bash("head -c 5M /dev/zero", timeout=60), "flood_mb")
        await _expect_works(session)


@check("a flood into a file ends at the file's largest size")
async def flood_to_a_file(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(file_size_mb=4))) as session:
        result = await session.bash("yes > /tmp/flood; stat -c %s /tmp/flood", timeout=60)
        expect(result.output.endswith(f"{4 * _MIB}\n"), f"the result is {result}")
        await _expect_works(session)


@check("a sandbox ends at its wall time; whoever is or gets connected learns why")
async def wall_time(bench: Bench) -> None:
    name, text = bench.new_name(), marker()
    async with bench.sandbox(SandboxSpec(limits=Limits(wall_seconds=2)), name) as session:
        try:
            await session.bash(f"bash -c 'exec -a {text} sleep 600' & sleep 600", timeout=60)
        except LimitExceeded as ended:
            expect_equal(ended.limit, "wall_seconds", "the limit")
        else:
            raise CheckFailed("the command went on")
        await _all_gone(text)
        later = await bench.backend.connect(name)
        try:
            await later.until_lost()
        except LimitExceeded as ended:
            expect_equal(ended.limit, "wall_seconds", "the limit")
        finally:
            await later.close()
