"""What happens when time is up, or the caller loses interest."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
import asyncio
import contextlib

from sandboxes import channel
from sandboxes.errors import SandboxProtocolError
from sandboxes.protocol import SandboxSpec, Session
from sandboxes.selfcheck.framework import (
    Bench,
    CheckFailed,
    check,
    expect,
    expect_equal,
    expect_output,
    host_processes_with,
    marker,
)


async def _all_gone(text: str) -> None:
    for _ in range(100):
        if not host_processes_with(text):
            return
        await asyncio.sleep(0.05)
    raise CheckFailed(f"processes {host_processes_with(text)} are still there")


async def _appears(text: str, count: int) -> None:
    for _ in range(200):
        if len(host_processes_with(text)) >= count:
            return
        await asyncio.sleep(0.05)
    raise CheckFailed(f"of {count} processes only {host_processes_with(text)} came up")


async def _is_free(session: Session) -> None:
    """The shell has noticed the end of what was running."""
    for _ in range(200):
        with contextlib.suppress(SandboxProtocolError):
            await session.bash("true", timeout=5)
            return
        await asyncio.sleep(0.05)
    raise CheckFailed("the shell is not free again")


async def _expect_answers(session: Session) -> None:
    expect_output(await session.bash("echo back", timeout=5), "back\n")


@check("a command is ended at its timeout; its rest is not run, and the shell keeps its state")
async def ends_command(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("x=kept; cd /tmp", timeout=5)
        result = await session.bash("echo begun; sleep 60; touch /tmp/after", timeout=0.5)
        expect(result.timed_out and result.exit_code is None and result.output == "begun\n", f"the result is {result}")
        expect(0.4 < result.duration < 5, f"it took {result.duration} s")
        expect_output(await session.bash("echo $x; pwd; ls /tmp", timeout=5), "kept\n/tmp\n")


@check("a timeout kills children that started sessions of their own, daemons and processes that ignore signals")
async def kills_detached_children(bench: Bench) -> None:
    text = marker()
    command = (
        f"setsid bash -c 'exec -a {text} sleep 600' & "
        f"(setsid setsid bash -c 'exec -a {text} sleep 600' &) ; "
        f"nohup bash -c 'trap \"\" INT TERM HUP; exec -a {text} sleep 600' >/dev/null & wait; sleep 600"
    )
    async with bench.sandbox() as session:
        running = asyncio.create_task(session.bash(command, timeout=2))
        await _appears(text, 3)
        expect((await running).timed_out, "it did not time out")
        await _all_gone(text)
        await _expect_answers(session)


@check("a timeout spares what earlier commands left in the background")
async def spares_earlier_processes(bench: Bench) -> None:
    text = marker()
    async with bench.sandbox() as session:
        await session.bash(f"bash -c 'exec -a {text} sleep 600' &", timeout=5)
        await session.bash("sleep 600", timeout=0.2)
        expect_equal(len(host_processes_with(text)), 1, "the number of surviving background processes")


@check("a shell that ignores interrupts is restarted in its directory, and the result says so")
async def restarts_stubborn_shell(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("true", timeout=5)
        result = await session.bash("cd /tmp; trap '' INT; while :; do sleep 1; done", timeout=1)
        expect(result.timed_out and result.restarted, f"the result is {result}")
        expect_output(await session.bash("pwd", timeout=5), "/tmp\n")


@check("a loop of builtins is ended at its timeout")
async def ends_busy_loop(bench: Bench) -> None:
    async with bench.sandbox() as session:
        expect((await session.bash("while :; do :; done", timeout=0.3)).timed_out, "it did not time out")
        await _expect_answers(session)


@check("a cell is interrupted at its timeout and keeps the interpreter's state")
async def interrupts_cell(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.python("x = 'kept'", timeout=10)
        result = await session.python("while True: pass", timeout=0.3)
        expect(result.timed_out and "KeyboardInterrupt" in (result.error or ""), f"the result is {result}")
        expect_equal((await session.python("x", timeout=10)).value, "'kept'", "a name from before")


@check("a cell that cannot be interrupted costs the interpreter, and the result says that the state is lost")
async def kills_stubborn_cell(bench: Bench) -> None:
    text = marker()
    code = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"subprocess.Popen(['bash', '-c', 'exec -a {text} sleep 600'], start_new_session=True)\nwhile True: pass"
    )
    async with bench.sandbox() as session:
        await session.python("import signal, subprocess", timeout=10)
        result = await session.python(code, timeout=2)
        expect(result.timed_out and result.restarted and "state is lost" in (result.error or ""), f"the result is {result}")
        await _all_gone(text)
        expect_equal((await session.python("1 + 1", timeout=10)).value, "2", "the next cell's value")


@check("cancelling a pending call kills what it runs; a queued one never runs")
async def cancels_calls(bench: Bench) -> None:
    text = marker()
    async with bench.sandbox() as session:
        running = asyncio.create_task(session.bash(f"bash -c 'exec -a {text} sleep 600'", timeout=600))
        queued = asyncio.create_task(session.bash("touch /tmp/queued", timeout=5))
        await _appears(text, 1)
        queued.cancel()
        running.cancel()
        await asyncio.gather(running, queued, return_exceptions=True)
        await _all_gone(text)
        expect_output(await session.bash("ls /tmp", timeout=5), "")


@check("when a connection is lost, what it runs is killed")
async def kills_for_lost_connection(bench: Bench) -> None:
    text = marker()
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        other = await bench.backend.connect(name)
        running = asyncio.create_task(other.bash(f"bash -c 'exec -a {text} sleep 600'", timeout=600))
        await _appears(text, 1)
        await other.close()
        await asyncio.gather(running, return_exceptions=True)
        await _all_gone(text)
        await _expect_answers(session)


@check("a command that goes on without a call is ended at its timeout; the next call is told")
async def ends_running_command(bench: Bench) -> None:
    text = marker()
    async with bench.sandbox() as session:
        result = await session.bash(f"(setsid bash -c 'exec -a {text} sleep 600' &); cat", timeout=4, quiet_timeout=0.1)
        expect(result.running, f"the result is {result}")
        await _appears(text, 1)
        await _all_gone(text)
        result = await session.bash_input(b"", timeout=60)
        expect(result.timed_out and result.exit_code is None and not result.running, f"the result is {result}")
        await _expect_answers(session)


@check("typing renews the timeout of the command that goes on; cancelling the call kills the command")
async def renews_timeout(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("cat", timeout=3, quiet_timeout=0.1)
        result = await session.bash_input(b"x\n", timeout=60, quiet_timeout=4)
        expect(result.running and result.output == "x\n", f"the result is {result}")
        waiting = asyncio.create_task(session.bash_input(b"", timeout=60))
        await session.ping()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await _expect_answers(session)


@check("when the connection is lost on which a command was left running, the command is killed")
async def kills_running_for_lost_connection(bench: Bench) -> None:
    text = marker()
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        other = await bench.backend.connect(name)
        result = await other.bash(f"bash -c 'exec -a {text} sleep 600'", timeout=600, quiet_timeout=0.1)
        expect(result.running, f"the result is {result}")
        await _appears(text, 1)
        await other.close()
        await _all_gone(text)
        await _is_free(session)
        await _expect_answers(session)


@check("a host that is connected and says nothing, as a frozen one does, does not keep a sandbox alive")
async def ends_for_silent_host(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(SandboxSpec(dead_man_seconds=3), name=name) as session:
        await session.close()
        with channel.connect(bench.backend.state_dir / name) as peer:
            peer.setblocking(True)
            peer.settimeout(30)
            expect_equal(await asyncio.to_thread(peer.recv, 1), b"", "what a silent host gets")


@check("a host that is busy with something else keeps its sandbox alive")
async def spares_idle_host(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(dead_man_seconds=3)) as session:
        await asyncio.sleep(6)
        await _expect_answers(session)
