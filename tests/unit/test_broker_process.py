"""The broker as a plain process, without a sandbox around it: what does not depend on isolation."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes import channel
from sandboxes.backends.bundle import START
from sandboxes.errors import SandboxFileError, SandboxLost, SandboxProtocolError
from sandboxes.session import BrokerSession
from tests.unit.conftest import start_broker


async def test_tools_keep_their_state_over_connections(session: BrokerSession, tmp_path: Path) -> None:
    await session.bash("x=5", timeout=5)
    await session.python("y = 6", timeout=10)
    await session.close()
    other = await BrokerSession.open("test", channel.connect(tmp_path))
    assert (await other.bash("echo $x", timeout=5)).output == "5\n"
    assert (await other.python("y", timeout=10)).value == "6"
    await other.close()


async def ended(pid: str) -> bool:
    """Whether the process ends within two seconds."""
    for _ in range(100):
        if not Path(f"/proc/{pid}/exe").exists():
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_child_that_outlives_its_parents_is_killed_at_the_timeout(session: BrokerSession, tmp_path: Path) -> None:
    result = await session.bash("(setsid sleep 600 & echo $! > pid); sleep 600", timeout=1)
    assert result.timed_out
    assert await ended((tmp_path / "pid").read_text().strip())


@pytest.mark.parametrize("leaves_nothing", [False, True])
async def test_what_a_command_leaves_running_goes_on_where_that_is_not_refused(
    session: BrokerSession, tmp_path: Path, leaves_nothing: bool
) -> None:
    await session.bash("sleep 600 & echo $! > before", timeout=5)
    leaves = "(sleep 600 & echo $! > near); (setsid sleep 600 & echo $! > far); echo left"
    result = await session.bash(leaves, timeout=5, leaves_nothing=leaves_nothing)
    assert (result.output, result.exit_code, result.timed_out, result.restarted) == ("left\n", 0, False, False)
    before, *left = [(tmp_path / name).read_text().strip() for name in ("before", "near", "far")]
    if leaves_nothing:
        assert [await ended(pid) for pid in left] == [True, True]
        left = []
    for pid in [before, *left]:
        os.kill(int(pid), signal.SIGKILL)  # raises where it is gone


async def test_a_command_that_closes_every_descriptor_costs_only_the_shell(session: BrokerSession) -> None:
    result = await session.bash('for fd in /proc/$$/fd/*; do eval "exec ${fd##*/}>&-"; done', timeout=1)
    assert result.restarted
    assert (await session.bash("echo back", timeout=5)).output == "back\n"


async def test_a_cell_that_writes_to_its_channel_costs_only_the_interpreter(session: BrokerSession) -> None:
    result = await session.python("import os; os.write(250, b'x' * 100)", timeout=5)
    assert result.restarted
    assert (await session.python("1 + 1", timeout=10)).value == "2"


async def test_cancelled_calls_free_the_tool(session: BrokerSession) -> None:
    calls = [asyncio.create_task(session.bash("sleep 600", timeout=600)) for _ in range(5)]
    await session.ping()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (await session.bash("echo free", timeout=5)).output == "free\n"


async def test_file_errors_carry_reason_and_path(session: BrokerSession) -> None:
    with pytest.raises(SandboxFileError) as raised:
        await session.read_file("none")
    assert (raised.value.reason, raised.value.path) == ("not_found", "none")


async def test_requests_the_broker_cannot_understand_are_protocol_errors(session: BrokerSession) -> None:
    with pytest.raises(SandboxProtocolError):
        await session.bash("true", timeout=-1)


async def test_closing_ends_pending_calls(session: BrokerSession) -> None:
    pending = asyncio.create_task(session.bash("sleep 600", timeout=600))
    await session.ping()
    await session.close()
    with pytest.raises(SandboxLost):
        await pending
    with pytest.raises(SandboxLost):
        await session.ping()


async def test_nobody_connected_ends_the_broker(bundle: Path, tmp_path: Path) -> None:
    process = start_broker(bundle, tmp_path, dead_man=0.2)
    assert await asyncio.to_thread(process.wait, 10) == 0


async def test_descriptors_do_not_leak_when_tools_restart(broker: subprocess.Popen[bytes], session: BrokerSession) -> None:
    async def restart_both() -> int:
        assert (await session.bash("exit 1", timeout=5)).restarted
        assert (await session.python("import os; os._exit(1)", timeout=10)).restarted
        return len(list(Path(f"/proc/{broker.pid}/fd").iterdir()))

    await restart_both()
    before = await restart_both()
    for _ in range(5):
        after = await restart_both()
    assert after == before


@pytest.mark.parametrize(
    "variables", [{"1A": "x"}, {"": "x"}, {"A-B": "x"}, {"A": "nul \0"}, {"A": "half \ud800"}, {"A": "x" * 5000}, {"A": 1}]
)
async def test_variables_that_cannot_be_set_are_refused(session: BrokerSession, variables: dict[str, str]) -> None:
    with pytest.raises(SandboxProtocolError, match="variables"):
        await session.set_env(variables)
    assert (await session.bash("echo here", timeout=5)).output == "here\n"


def test_what_is_slow_to_import_is_not_imported_before_the_broker_can_answer(bundle: Path) -> None:
    prepare, main, _ = START.partition("from broker.main")
    assert main
    code = f"""{prepare}
before = set(sys.modules)
for module in set(code) - {{"broker.worker"}}:
    __import__(module)
print(*set(sys.modules) - before)
"""
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(bundle)], capture_output=True, text=True, check=True)
    imported = set(run.stdout.split())
    assert "broker.server" in imported
    assert not imported & {"contextlib", "ctypes", "enum", "functools", "json", "re", "signal", "socket", "typing"}, (
        "broker/lean.py says where to import these from"
    )
