"""Limits that programs run into by themselves, as errors; `hogs` has those for which commands are ended."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
from sandboxes.protocol import Limits, SandboxSpec
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, expect_output, value_of


@check("a process that wants more memory than allowed gets an error; the sandbox goes on")
async def bounds_memory(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(memory_mb=256))) as session:
        cell = await session.python("x = bytearray(1 << 30)", timeout=20)
        expect("MemoryError" in (cell.error or ""), f"the cell gave {cell}")
        result = await session.bash("python3 -c 'x = bytearray(1 << 30)'", timeout=20)
        expect(result.exit_code == 1 and "MemoryError" in result.output, f"the command gave {result}")
        expect_output(await session.bash("echo back", timeout=5), "back\n")
        expect_equal((await session.python("1 + 1", timeout=10)).value, "2", "the next cell's value")


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
            fill = f"for i in $(seq 100); do head -c 1M /dev/zero > {directory}/f$i || break; done 2>/dev/null"
            await session.bash(f"[ -w {directory} ] && {fill}", timeout=60)
            result = await session.bash(f"cat {directory}/f[0-9]* 2>/dev/null | wc -c; rm -f {directory}/f[0-9]*", timeout=20)
            expect(int(result.output) <= 70 << 20, f"{directory} took {result.output} bytes")
        result = await session.bash("for d in / /run /var /etc /home; do touch $d/x 2>/dev/null && echo $d; done", timeout=5)
        expect_equal(result.output, "", "the list of other writable places")


@check("the number of open files is bounded")
async def bounds_open_files(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(open_files=300))) as session:
        result = await session.python("files = [open('/dev/null') for _ in range(1000)]", timeout=10)
        expect("Too many open files" in (result.error or ""), f"the cell gave {result}")
        expect_output(await session.bash("echo back", timeout=5), "back\n")


@check("of a command's output no more is kept than the limit, and the result says how much is missing")
async def bounds_output(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(output_bytes=2000))) as session:
        result = await session.bash("seq 100000", timeout=20)
        expect(result.output.startswith("1\n2\n") and result.output.endswith("99999\n100000\n"), "its ends are not kept")
        expect(len(result.output) < 2100, f"{len(result.output)} characters were returned")
        expect(588_895 - 2000 <= result.truncated_bytes < 588_895, f"{result.truncated_bytes} bytes are said to be missing")


@check("no more CPUs than allowed are used")
async def bounds_cpus(bench: Bench) -> None:
    mechanism = (await bench.backend.probe())["cpus"]
    async with bench.sandbox(SandboxSpec(limits=Limits(cpus=0.5))) as session:
        if mechanism == "affinity":
            expect_equal(await value_of(session, "import os; len(os.sched_getaffinity(0))"), 1, "the number of CPUs")
            cell = await session.python("os.sched_setaffinity(0, range(1000))", timeout=20)
            expect("PermissionError" in (cell.error or ""), f"the CPUs could be changed: {cell}")
        else:
            expect_equal(mechanism, "cgroup", "the mechanism")
            used = "import time; e = time.monotonic() + 2\nwhile time.monotonic() < e: pass\ntime.process_time() < 1.5"
            expect_equal(await value_of(session, used), True, "whether half of a CPU was used at most")


@check("when the host's memory runs out, the kernel takes what the agent started, not the broker")
async def offers_processes_to_the_kernel(bench: Bench) -> None:
    async with bench.sandbox() as session:
        expect_output(await session.bash("cat /proc/self/oom_score_adj", timeout=20), "1000\n")
        code = "open('/proc/self/oom_score_adj').read(), int(open('/proc/1/oom_score_adj').read()) < 1000"
        expect_equal(await value_of(session, code), ("1000\n", True), "the scores")


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
