"""Nothing is left behind: no process, no file, whatever happened before."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
import asyncio
import contextlib
from pathlib import Path

from sandboxes.errors import SandboxExists
from sandboxes.protocol import Bind, SandboxSpec
from sandboxes.selfcheck.framework import Bench, CheckFailed, check, expect, expect_equal, host_processes_with, marker

_DETACHED = "setsid bash -c 'exec -a {0} sleep 600' & (setsid bash -c 'trap \"\" TERM INT; exec -a {0} sleep 600' &); true"


@check("stop leaves no process, however detached, and no file; stopping again is fine, as is an unknown name")
async def stop_removes_everything(bench: Bench) -> None:
    text = marker()
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        await session.bash(_DETACHED.format(text), timeout=5)
        await session.python(f"import subprocess; subprocess.Popen(['bash', '-c', 'exec -a {text} sleep 600'])", timeout=10)
        for _ in range(100):
            if len(host_processes_with(text)) >= 3:
                break
            await asyncio.sleep(0.05)
        expect(len(host_processes_with(text)) >= 3, "the processes did not come up")
        expect(name in await bench.backend.list(), "a running sandbox is not listed")
        await bench.backend.stop(name)
        expect_equal(host_processes_with(text), [], "the list of surviving processes")
        expect(name not in await bench.backend.list(), "a stopped sandbox is still listed")
        expect(not (bench.backend.state_dir / name).exists(), "files are left")
        await bench.backend.stop(name)
    await bench.backend.stop(bench.new_name())


@check("stop works while a command runs")
async def stop_interrupts_commands(bench: Bench) -> None:
    text = marker()
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        pending = asyncio.create_task(session.bash(f"bash -c 'exec -a {text} sleep 600'", timeout=600))
        while not host_processes_with(text) and not pending.done():
            await asyncio.sleep(0.02)
        await bench.backend.stop(name)
        expect_equal(host_processes_with(text), [], "the list of surviving processes")
        results = await asyncio.gather(pending, return_exceptions=True)
        expect(isinstance(results[0], Exception), "the command has a result")


@check("concurrent stops of one sandbox all succeed")
async def stop_concurrently(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(name=name):
        await asyncio.gather(*(bench.backend.stop(name) for _ in range(4)))
        expect(name not in await bench.backend.list(), "a stopped sandbox is still listed")


@check("a name in use is refused, and the sandbox that has it is untouched")
async def start_refuses_duplicates(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        try:
            await bench.backend.start(name, SandboxSpec())
        except SandboxExists:
            expect(await session.ping() < 5, "the first sandbox does not answer")
            return
        raise CheckFailed("a second sandbox of the same name was started")


@check("a start cancelled at any moment leaves nothing that list and stop do not find")
async def cancelled_start_leaves_nothing(bench: Bench) -> None:
    for milliseconds in (0, 1, 2, 5, 10, 15, 20, 30, 50):
        name = bench.new_name()
        text = marker()
        # Its mounts tell a leftover of this sandbox from other processes.
        start = asyncio.create_task(bench.backend.start(name, SandboxSpec(binds=(Bind("/usr", f"/opt/{text}"),))))
        await asyncio.sleep(milliseconds / 1000)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        left = bench.backend.state_dir / name
        if left.exists():
            expect(name in await bench.backend.list(), f"after {milliseconds} ms {left} is there but not listed")
        await bench.backend.stop(name)
        expect(not left.exists(), f"after {milliseconds} ms {left} is left")
        expect_equal(_processes_mounting(text), [], f"the list of processes left after {milliseconds} ms")


@check("a sandbox that cannot start says why, and is cleaned up by stop")
async def failed_start_is_explained(bench: Bench) -> None:
    name = bench.new_name()
    try:
        await bench.backend.start(name, SandboxSpec(binds=(Bind("/usr", "/tmp/../etc"),)))
    except Exception as error:
        expect("/tmp/../etc" in str(error), f"the message is {error}")
        return
    finally:
        await bench.backend.stop(name)
        expect(name not in await bench.backend.list(), "it is still listed")
    raise CheckFailed("a bind over /etc was accepted")


@check("zombies do not pile up")
async def reaps_orphans(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("for i in $(seq 20); do (setsid true &); done; sleep 0.2", timeout=10)
        await session.python(
            "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        os.fork(); os._exit(0)\n    os.wait()", timeout=10
        )
        result = await session.bash("sleep 0.2; cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '", timeout=5)
        expect_equal(result.output, "0\n", "the number of zombies")


def _processes_mounting(text: str) -> list[int]:
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                if text in (directory / "mountinfo").read_text():
                    found.append(int(directory.name))
    return found
