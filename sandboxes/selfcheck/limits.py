"""Resource limits: what exceeds them fails by itself, and the sandbox goes on."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
from sandboxes.protocol import Limits, SandboxSpec
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, expect_output

_FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@check("a process that wants more memory than allowed gets an error; the sandbox goes on")
async def bounds_memory(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(memory_mb=256))) as session:
        cell = await session.python("x = bytearray(1 << 30)", timeout=20)
        expect("MemoryError" in (cell.error or ""), f"the cell gave {cell}")
        result = await session.bash("python3 -c 'x = bytearray(1 << 30)'", timeout=20)
        expect(result.exit_code == 1 and "MemoryError" in result.output, f"the command gave {result}")
        expect_output(await session.bash("echo back", timeout=5), "back\n")
        expect_equal((await session.python("1 + 1", timeout=10)).value, "2", "the next cell's value")


@check("a fork bomb hits the process limit, ends at its timeout, and leaves a working sandbox")
async def bounds_processes(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(processes=40))) as session:
        await session.write_file("bomb.py", _FORK_BOMB.encode())
        result = await session.bash("cd; timeout -s KILL 600 python3 bomb.py", timeout=2)
        expect(result.timed_out, f"the bomb gave {result}")
        expect(await session.ping() < 5, "the broker is slow")
        result = await session.bash(
            "for i in $(seq 50); do grep -qs '[b]omb.py' /proc/[0-9]*/cmdline || break; sleep 0.1; done; echo $i", timeout=20
        )
        expect(result.exit_code == 0 and int(result.output) < 50, f"afterwards: {result}")


@check("the number of processes is bounded")
async def counts_processes(bench: Bench) -> None:
    code = """
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            time.sleep(600)
        count += 1
except OSError:
    pass
open("count", "w").write(str(count))
"""
    async with bench.sandbox(SandboxSpec(limits=Limits(processes=40))) as session:
        await session.write_file("count.py", code.encode())
        await session.bash("cd; python3 count.py", timeout=10)
        count = int(await session.read_file("count"))
        expect(0 < count <= 40, f"{count} processes could be started")


@check("a file cannot grow beyond the limit")
async def bounds_file_size(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(file_size_mb=1))) as session:
        result = await session.bash("head -c 2M /dev/zero > /tmp/big; stat -c %s /tmp/big", timeout=10)
        expect(result.output.endswith("1048576\n"), f"the result is {result}")


@check("what is written is bounded in sum, wherever it is written")
async def bounds_disk(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(disk_mb=4))) as session:
        for directory in ("/tmp", "~", "/dev/shm", "/dev"):
            fill = f"for i in $(seq 100); do head -c 1M /dev/zero > {directory}/f$i || break; done 2>/dev/null; echo $i"
            command = f"if [ -w {directory} ]; then {fill}; else echo 0; fi"
            result = await session.bash(command, timeout=20)
            expect(int(result.output) <= 70, f"{directory} took {result.output} MiB")
        result = await session.bash(
            "for d in / /run /var /etc /home; do touch $d/x 2>/dev/null && echo $d; done", timeout=5
        )
        expect_equal(result.output, "", "the list of other writable places")


@check("the number of open files is bounded")
async def bounds_open_files(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(open_files=300))) as session:
        result = await session.python("files = [open('/dev/null') for _ in range(1000)]", timeout=10)
        expect("Too many open files" in (result.error or ""), f"the cell gave {result}")
        expect_output(await session.bash("echo back", timeout=5), "back\n")


@check("limits cannot be raised from inside")
async def keeps_limits(bench: Bench) -> None:
    async with bench.sandbox() as session:
        for flag in ("-v", "-u", "-n", "-f"):
            result = await session.bash(f"ulimit {flag} unlimited", timeout=5)
            expect(result.exit_code != 0, f"`ulimit {flag} unlimited` succeeded")


@check("`start` reports for every limit how it is enforced")
async def reports_enforcement(bench: Bench) -> None:
    name = bench.new_name()
    try:
        info = await bench.backend.start(name, SandboxSpec())
    finally:
        await bench.backend.stop(name)
    expect(set(Limits.__dataclass_fields__) <= set(info.enforced), f"only {sorted(info.enforced)} are reported")
