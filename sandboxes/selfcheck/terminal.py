"""The terminal that commands run on, and going on with a command that waits."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
import asyncio

from sandboxes.errors import InputRefused, SandboxProtocolError
from sandboxes.protocol import CommandResult, Limits, SandboxSpec, Session
from sandboxes.selfcheck.framework import Bench, CheckFailed, check, expect, expect_equal, expect_output

INTERRUPT, END_OF_FILE, SUSPEND = b"\x03", b"\x04", b"\x1a"

_TRAP = b"""
import time
try:
    print(end="ready")
    time.sleep(600)
except KeyboardInterrupt:
    print("caught")
"""


async def _leave_running(session: Session, command: str) -> CommandResult:
    """Run a command that prints a last `ready` and then waits."""
    result = await session.bash(command, timeout=60, quiet_timeout=0.3)
    while result.running and not result.output.endswith("ready"):
        result = await session.bash_input(b"", timeout=60, quiet_timeout=0.3)
    expect(result.running and result.exit_code is None and not result.timed_out, f"{command!r} gave {result}")
    return result


async def _refusal(session: Session, command: str) -> str:
    try:
        result = await session.bash(command, timeout=5)
    except SandboxProtocolError as error:
        return str(error)
    raise CheckFailed(f"{command!r} was accepted: {result}")


@check("commands see a terminal, which has a size, does not echo, and changes nothing on the way out")
async def is_a_terminal(bench: Bench) -> None:
    async with bench.sandbox() as session:
        expect_output(await session.bash("test -t 0 && test -t 1 && test -t 2 && stty size", timeout=5), "50 200\n")
        expect_output(
            await session.bash("echo to-tty > /dev/tty; tty | cut -c 1-9; cat <<< x", timeout=5), "to-tty\n/dev/pts/\nx\n"
        )


@check("programs that would page or draw just print; the spec's environment decides otherwise")
async def is_plain(bench: Bench) -> None:
    async with bench.sandbox() as session:
        expect_output(await session.bash("echo $TERM $PAGER $GIT_PAGER", timeout=5), "dumb cat cat\n")
    async with bench.sandbox(SandboxSpec(env={"TERM": "xterm"})) as session:
        expect_output(await session.bash("echo $TERM $PAGER", timeout=5), "xterm cat\n")


@check("what a command did to the terminal, and input it did not read, are gone with the next one")
async def is_reset(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("stty raw -isig echo opost onlcr olcuc tostop rows 9 cols 9; printf mess", timeout=5)
        expect_output(await session.bash("stty size; echo line", timeout=5), "50 200\nline\n")
        await _leave_running(session, "printf ready; read -r first")
        expect_output(await session.bash_input(b"one\ntwo\n", timeout=10), "")
        result = await session.bash('read -r -t 0.2 second; echo "$first-$second"', timeout=10)
        expect_output(result, "one-\n")


@check("a command that prints nothing for the quiet timeout is returned as running, and goes on with what is typed")
async def takes_input(bench: Bench) -> None:
    async with bench.sandbox() as session:
        result = await _leave_running(session, "cd /tmp; printf 'name? ready'; read -r name; echo \"hello $name\"; (exit 4)")
        expect_equal((result.output[-11:], result.cwd), ("name? ready", "/tmp"), "what it printed and where")
        result = await session.bash_input("Zoë\n".encode(), timeout=10)
        expect_equal((result.output, result.exit_code, result.running), ("hello Zoë\n", 4, False), "how it went on")
        expect_output(await session.bash("echo $name", timeout=5), "Zoë\n")


@check("Ctrl-C interrupts the program that runs, Ctrl-D ends its input, Ctrl-Z suspends it")
async def takes_control_characters(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await _leave_running(session, "printf ready; sleep 600; echo not-this")
        result = await session.bash_input(INTERRUPT, timeout=10)
        expect_equal((result.exit_code, "not-this" in result.output), (130, False), "the interrupted command's end")
        await session.write_file("/tmp/trap.py", _TRAP)
        await _leave_running(session, "python3 -u /tmp/trap.py")
        expect_output(await session.bash_input(INTERRUPT, timeout=10), "caught\n")
        await _leave_running(session, "printf ready; cat; echo end")
        expect_output(await session.bash_input(b"text\n" + END_OF_FILE, timeout=10), "text\nend\n")
        await _leave_running(session, "printf ready; sleep 600")
        result = await session.bash_input(SUSPEND, timeout=10)
        expect(not result.running and result.exit_code == 148, f"the suspended command gave {result}")
        expect_output(await session.bash("kill -9 %1; wait %1 2>/dev/null; echo killed", timeout=5), "killed\n")


@check("input that is long is all read, line by line; a line longer than a terminal takes is refused")
async def takes_much_input(bench: Bench) -> None:
    lines = b"".join(b"%060d\n" % number for number in range(1000))
    async with bench.sandbox() as session:
        await _leave_running(session, "printf ready; sleep 0.5; cat > /tmp/typed")
        try:
            await session.bash_input(b"x" * 5000 + b"\n", timeout=10)
        except InputRefused as error:
            expect("4095" in str(error), f"the refusal is {error}")
        else:
            raise CheckFailed("a line of 5000 bytes was accepted")
        result = await session.bash_input(lines + END_OF_FILE, timeout=20)
        expect(result.exit_code == 0, f"the result is {result}")
        expect_equal(await session.read_file("/tmp/typed") == lines, True, "equality of what was typed")


@check("while a command goes on, another one is refused, also one that waits; input without a command is refused")
async def refuses_what_does_not_fit(bench: Bench) -> None:
    async with bench.sandbox() as session:
        try:
            await session.bash_input(b"x\n", timeout=5)
        except SandboxProtocolError as error:
            expect("no command" in str(error), f"the refusal is {error}")
        else:
            raise CheckFailed("input without a command was accepted")
        first = asyncio.create_task(_leave_running(session, "printf ready; sleep 600"))
        await session.ping()
        queued = asyncio.create_task(_refusal(session, "echo queued"))
        await first
        for refusal in (await queued, await _refusal(session, "echo new")):
            expect("bash_input" in refusal, f"the refusal is {refusal!r}")
        expect_equal((await session.python("1 + 1", timeout=10)).value, "2", "a cell beside it")
        result = await session.bash_input(INTERRUPT, timeout=10)
        expect_equal(result.exit_code, 130, "its exit code")
        expect_output(await session.bash("echo free", timeout=5), "free\n")


@check("what becomes of a running command while nobody waits for it is kept: the next call gets it")
async def keeps_unclaimed_results(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await _leave_running(session, "printf ready; until [ -e /tmp/go ]; do sleep 0.05; done; echo rest; (exit 5)")
        await session.write_file("/tmp/go", b"")
        await session.python("import time; time.sleep(0.5)", timeout=10)
        result = await session.bash_input(b"ignored\n", timeout=10)
        expect_equal((result.output, result.exit_code, result.running), ("rest\n", 5, False), "the rest of it")
        await _leave_running(session, "printf ready; until [ -e /tmp/again ]; do sleep 0.05; done; echo late")
        await session.write_file("/tmp/again", b"")
        for _ in range(100):
            try:
                result = await session.bash("echo next", timeout=5)
                break
            except SandboxProtocolError:
                await asyncio.sleep(0.1)
        expect_output(result, "late\nnext\n")


@check("output is handed on while the command runs, in few pieces that make up the result")
async def streams_output(bench: Bench) -> None:
    async with bench.sandbox() as session:
        pieces: list[bytes] = []
        first = asyncio.Event()

        def on_output(piece: bytes) -> None:
            pieces.append(piece)
            first.set()

        command = "echo begun; until [ -e /tmp/go ]; do sleep 0.05; done; for i in $(seq 3000); do echo $i; done"
        running = asyncio.create_task(session.bash(command, timeout=30, on_output=on_output))
        async with asyncio.timeout(20):
            await first.wait()
        expect(not running.done(), "the first piece came with the result")
        await session.write_file("/tmp/go", b"")
        result = await running
        expect_equal(b"".join(pieces).decode() == result.output, True, "equality of pieces and result")
        expect_equal(result.output, "begun\n" + "".join(f"{n}\n" for n in range(1, 3001)), "the output")
        expect(len(pieces) < 1500, f"it came in {len(pieces)} pieces")
        pieces.clear()
        cell = await session.python("import sys\nfor i in range(3000): print(i, flush=True)", timeout=30, on_output=on_output)
        expect(cell.output == b"".join(pieces).decode() and len(pieces) < 1500, f"a cell's output came in {len(pieces)} pieces")


@check("a flood is handed on in pieces of bounded size that say what is cut, and the result keeps head and tail")
async def bounds_streamed_output(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(output_bytes=1000))) as session:
        pieces: list[bytes] = []
        result = await session.bash("seq 200000", timeout=30, on_output=pieces.append)
        expect(max(map(len, pieces)) < 1100, "a piece is longer than the limit")
        expect(b"bytes cut" in b"".join(pieces), "no piece says that something is cut")
        expect(result.output.startswith("1\n2\n") and result.output.endswith("\n200000\n"), "head or tail is missing")
        expect(b"".join(pieces).endswith(b"\n200000\n"), "the last piece does not end with the output's end")
