"""The `bash` verb."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
import asyncio

from sandboxes.protocol import Limits, SandboxSpec
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, expect_output


@check("variables, functions and the working directory survive between commands")
async def keeps_state(bench: Bench) -> None:
    async with bench.sandbox() as session:
        result = await session.bash("x=5; f() { echo f$1; }; mkdir -p /tmp/a; cd /tmp/a", timeout=5)
        expect_equal(result.cwd, "/tmp/a", "the reported directory")
        expect_output(await session.bash("f $x; pwd", timeout=5), "f5\n/tmp/a\n")


@check("exit codes are those of the last command, also of pipes, signals and syntax errors")
async def reports_exit_codes(bench: Bench) -> None:
    commands = {"true": 0, "false": 1, "(exit 42)": 42, "true | false": 1, "nosuchcommand": 127, "sh -c 'kill -9 $$'": 137}
    async with bench.sandbox() as session:
        for command, expected in commands.items():
            expect_equal((await session.bash(command, timeout=5)).exit_code, expected, f"the exit code of {command!r}")


@check("standard output and standard error come back together, in order")
async def merges_streams(bench: Bench) -> None:
    async with bench.sandbox() as session:
        expect_output(await session.bash("echo 1; echo 2 >&2; echo 3", timeout=5), "1\n2\n3\n")


@check("escape sequences and every byte but those that are no UTF-8 come back as printed")
async def keeps_bytes(bench: Bench) -> None:
    async with bench.sandbox() as session:
        expect_output(await session.bash(r"printf '\033[31mred\033[0m\r\n\t\a\0.'", timeout=5), "\033[31mred\033[0m\r\n\t\a\0.")
        expect_output(await session.bash("printf 'a\\377b\\0c'", timeout=5), "a\N{REPLACEMENT CHARACTER}b\0c")


@check("everything a command prints is in its own result, however it ends and whatever goes on in the background")
async def attributes_output(bench: Bench) -> None:
    # How much the background prints before the next command begins is up to how busy the host is.
    limits = Limits(output_bytes=32 * 1024 * 1024, flood_mb=1024 * 1024)
    async with bench.sandbox(SandboxSpec(limits=limits)) as session:
        for number in range(100):
            result = await session.bash(f"head -c {number * 150} /dev/zero | tr '\\0' x; echo {number}", timeout=10)
            expect_output(result, "x" * (number * 150) + f"{number}\n")
        await session.bash("yes > /dev/tty & yes >&2 &", timeout=5)
        for number in range(5):
            result = await session.bash(f"echo mark-{number}-; (exit 3)", timeout=10)
            expect(result.exit_code == 3 and f"mark-{number}-\n" in result.output, f"beside a flood: {result}")
        await session.bash("kill %1 %2; wait", timeout=10)
        expect_output(await session.bash("echo quiet", timeout=5), "quiet\n")


@check("unbalanced quotes, open here-documents and aborted expansions give a result, and the shell goes on")
async def survives_broken_commands(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("x=kept", timeout=5)
        for command in ("echo 'open", "if true; then", "echo $(", "${nothing:?missing}", "cat <<E\ntext"):
            result = await session.bash(command, timeout=5)
            expect(not result.timed_out and not result.restarted, f"{command!r} gave {result}")
        expect_output(await session.bash("echo $x", timeout=5), "kept\n")


@check("`exit` and `exec` end the shell: the code is reported, the next command gets a new shell in the same directory")
async def restarts_after_exit(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("cd /tmp", timeout=5)
        result = await session.bash("exit 3", timeout=5)
        expect(result.exit_code == 3 and result.restarted, f"`exit 3` gave {result}")
        expect_output(await session.bash("pwd", timeout=5), "/tmp\n")
        result = await session.bash("exec echo replaced", timeout=5)
        expect(result.output == "replaced\n" and result.restarted, f"`exec` gave {result}")
        expect_output(await session.bash("pwd", timeout=5), "/tmp\n")


@check("a background process does not hold up its command, and lives on")
async def leaves_background_processes_alone(bench: Bench) -> None:
    async with bench.sandbox() as session:
        result = await session.bash("sleep 60 & echo $! > /tmp/pid", timeout=5)
        expect(result.duration < 30 and result.exit_code == 0, f"starting it gave {result}")
        expect_output(await session.bash("kill -0 $(cat /tmp/pid) && echo alive", timeout=5), "alive\n")


@check("output over the limit keeps its head and its tail, and the result says how many bytes are missing")
async def cuts_long_output(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(output_bytes=1000))) as session:
        result = await session.bash("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last", timeout=20)
        total = len("first\n") + 5_000_000 + len("\nlast\n")
        expect(result.output.startswith("first\n") and result.output.endswith("\nlast\n"), "head or tail is missing")
        expect_equal(result.truncated_bytes, total - 1000, "the number of missing bytes")
        expect(str(total - 1000) in result.output, "the output does not say how much is missing")
        expect(len(result.output) < 1100, f"{len(result.output)} characters were kept")


@check("a command of a megabyte runs")
async def runs_long_commands(bench: Bench) -> None:
    text = "y" * 1_000_000
    async with bench.sandbox() as session:
        result = await session.bash(f"cat > /tmp/long <<'E'\n{text}\nE\nwc -c < /tmp/long", timeout=20)
        expect_output(result, f"{len(text) + 1}\n")


@check("variables set from outside reach commands and cells, running shells and new ones, whatever they contain")
async def takes_variables(bench: Bench) -> None:
    odd = 'it\'s $HOME `x`\\ "é"\nline'
    async with bench.sandbox() as session:
        await session.set_env({"BEFORE": odd})
        expect_output(await session.bash('printf %s "$BEFORE"', timeout=5), odd)
        await session.set_env({"LATER": odd, "BEFORE": "2"})
        expect_output(await session.bash('printf %s "$BEFORE$LATER"', timeout=5), "2" + odd)
        expect_output(await session.bash("env | grep -c ^BEFORE=2", timeout=5), "1\n")
        await session.bash("exit", timeout=5)
        expect_output(await session.bash('printf %s "$BEFORE$LATER"', timeout=5), "2" + odd)
        expect_equal((await session.python("import os\nos.environ['LATER']", timeout=10)).value, repr(odd), "in a cell")
        await session.set_env({"LATER": "3"})
        expect_equal((await session.python("os.environ['LATER']", timeout=10)).value, "'3'", "in the next cell")


@check("concurrent commands queue up in order; shell and interpreter work side by side")
async def queues_commands(bench: Bench) -> None:
    async with bench.sandbox() as session:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(session.bash(f"echo {number} >> /tmp/order", timeout=10))
        expect_output(await session.bash("cat /tmp/order", timeout=5), "".join(f"{n}\n" for n in range(20)))
        blocked = asyncio.create_task(session.bash("until [ -e /tmp/go ]; do sleep 0.05; done", timeout=20))
        cell = await session.python("open('/tmp/go', 'w').close()", timeout=10)
        expect(cell.error is None, f"the cell failed: {cell.error}")
        expect_equal((await blocked).exit_code, 0, "the exit code of the command that waited for a cell")
