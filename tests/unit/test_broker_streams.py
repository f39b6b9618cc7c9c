"""What the broker sends and takes in pieces, and the terminal: its bounds, and what a command can do to it."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes import channel
from sandboxes.broker.framing import FrameReader, encode
from sandboxes.errors import InputRefused, SandboxFileError, SandboxProtocolError
from sandboxes.session import BrokerSession

MEBIBYTE = 1024 * 1024


def peak_memory(process: subprocess.Popen[bytes]) -> int:
    """Bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


async def wait_for(path: Path) -> None:
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.02)


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(MEBIBYTE)


def receive_until_answer(peer: socket.socket, number: int) -> tuple[int, dict[str, object]]:
    """(bytes in frames before the answer to request `number`, the answer's header)."""
    frames, received = FrameReader(), 0
    while True:
        for header, payload in frames.feed(peer.recv(1 << 18)):
            if header["id"] == number and "more" not in header:
                return received, header
            received += len(payload)


@pytest.mark.parametrize(
    "spoil",
    [
        "import termios; termios.tcflow(1, termios.TCOOFF)",
        "import fcntl, struct, termios; fcntl.ioctl(1, termios.TIOCSETD, struct.pack('i', 27))",
        "import fcntl, termios; fcntl.ioctl(1, termios.TIOCEXCL)",
        "import os; os.set_blocking(1, False)",
        "import termios, tty; tty.setraw(0); termios.tcflush(1, termios.TCIOFLUSH)",
    ],
)
async def test_a_command_cannot_spoil_the_terminal_for_the_next(session: BrokerSession, spoil: str) -> None:
    await session.bash(f'python3 -c "{spoil}"', timeout=10)
    assert (await session.bash("echo back; stty size", timeout=5)).output == "back\n50 200\n"
    assert (await session.bash("python3 -c 'import os; print(os.get_blocking(1))'", timeout=10)).output == "True\n"


async def test_a_terminal_stopped_while_something_prints_in_the_background_goes_on(session: BrokerSession) -> None:
    ticks = "(while :; do echo tick; sleep 0.01; done) &"
    await session.bash(f'{ticks} python3 -c "import termios; termios.tcflow(1, termios.TCOOFF)"', timeout=10)
    result = await session.bash("echo back", timeout=10)
    assert result.exit_code == 0
    assert "back\n" in result.output


async def test_typed_input_that_nobody_reads_is_bounded(session: BrokerSession) -> None:
    assert (await session.bash("sleep 600", timeout=600, quiet_timeout=0.1)).running
    with pytest.raises(InputRefused, match="did not read"):
        for _ in range(10):
            await session.bash_input(b"line\n" * 2000, timeout=600, quiet_timeout=0.05)
    assert (await session.bash_input(b"", timeout=0.1)).timed_out
    assert (await session.bash('read -r -t 0.2 line; echo "[$line]"', timeout=5)).output == "[]\n"


async def test_a_line_discipline_that_is_none_can_be_typed_into(session: BrokerSession) -> None:
    change = "import fcntl, struct, termios, time; fcntl.ioctl(1, termios.TIOCSETD, struct.pack('i', 27)); time.sleep(600)"
    assert (await session.bash(f'python3 -c "{change}"', timeout=600, quiet_timeout=1)).running
    assert (await session.bash_input(b"x" * 5000, timeout=0.2)).timed_out
    assert (await session.bash("echo back", timeout=5)).output == "back\n"


async def test_what_a_host_left_unclaimed_does_not_reach_the_next(session: BrokerSession, tmp_path: Path) -> None:
    other = await BrokerSession.open("other", channel.connect(tmp_path))
    command = "until [ -e go ]; do sleep 0.05; done; echo stale; touch done"
    assert (await other.bash(command, timeout=60, quiet_timeout=0.1)).running
    (tmp_path / "go").touch()
    await wait_for(tmp_path / "done")
    await session.python("import time; time.sleep(0.2)", timeout=10)
    await other.close()
    assert (await session.bash("echo fresh", timeout=5)).output == "fresh\n"
    with pytest.raises(SandboxProtocolError, match="no command"):
        await session.bash_input(b"", timeout=5)


async def test_a_limit_that_an_unclaimed_command_exceeded_is_told_with_the_next(session: BrokerSession, tmp_path: Path) -> None:
    command = "until [ -e go ]; do sleep 0.05; done; yes"
    assert (await session.bash(command, timeout=60, quiet_timeout=0.1)).running
    (tmp_path / "go").touch()
    async with asyncio.timeout(60):
        while True:
            try:
                result = await session.bash("sleep 600", timeout=600)
                break
            except SandboxProtocolError:  # it is still running
                await asyncio.sleep(0.1)
    assert (result.limit_exceeded, result.exit_code) == ("flood_mb", None)
    assert (await session.bash("echo back", timeout=5)).limit_exceeded == ""


async def test_a_status_that_the_command_forges_costs_only_the_shell(session: BrokerSession) -> None:
    write = "case $(readlink $fd) in pipe:*) echo 'forged 0' > $fd;; esac"
    forge = f"for fd in /proc/$$/fd/*; do {write}; done 2>/dev/null; sleep 9"
    result = await session.bash(forge, timeout=5)
    assert result.restarted
    assert result.exit_code != 0
    assert (await session.bash("echo back", timeout=5)).output == "back\n"


async def test_live_output_takes_no_memory_while_the_host_does_not_read(
    broker: subprocess.Popen[bytes], session: BrokerSession, tmp_path: Path
) -> None:
    await session.bash("true", timeout=5)
    before = peak_memory(broker)
    with channel.connect(tmp_path) as peer:
        peer.setblocking(True)
        peer.settimeout(30)
        peer.sendall(encode({"id": 1, "verb": "bash", "timeout": 60, "live": True}, b"head -c 40000000 /dev/zero"))
        assert (await session.bash("echo done", timeout=60)).output == "done\n"  # queued behind the other one
        assert peak_memory(broker) - before < 8 * MEBIBYTE
        received, answer = await asyncio.to_thread(receive_until_answer, peer, 1)
    assert answer["truncated_bytes"] == 40_000_000 - 1000
    assert received < 8 * MEBIBYTE


async def test_an_error_of_the_listener_ends_the_command_and_nothing_else(session: BrokerSession) -> None:
    def listener(_: bytes) -> None:
        raise KeyError("listener")

    with pytest.raises(KeyError):
        await session.bash("echo something; sleep 600", timeout=600, on_output=listener)
    assert (await session.bash("echo back", timeout=5)).output == "back\n"


async def test_transfers_take_little_memory(broker: subprocess.Popen[bytes], session: BrokerSession) -> None:
    await session.upload("file", pieces(1))
    before = peak_memory(broker)
    await session.upload("file", pieces(16))
    size = 0
    async for piece in session.download("file"):
        size += len(piece)
        await session.ping()  # a slow reader: everything that may come has come
    assert size == 16 * MEBIBYTE
    assert peak_memory(broker) - before < 10 * MEBIBYTE


async def test_an_upload_whose_host_is_gone_leaves_nothing(session: BrokerSession, tmp_path: Path) -> None:
    other = await BrokerSession.open("other", channel.connect(tmp_path))
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"piece"
            if list(tmp_path.glob(".upload-*")):
                begun.set()
                await asyncio.sleep(600)
            await asyncio.sleep(0)

    upload = asyncio.create_task(other.upload("file", endless()))
    await begun.wait()
    await other.close()
    upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)
    await session.ping()
    assert list(tmp_path.glob("*file*")) + list(tmp_path.glob(".upload-*")) == []


async def test_the_number_of_transfers_is_bounded(session: BrokerSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8 * MEBIBYTE))
    downloads = [session.download("file") for _ in range(65)]
    with pytest.raises(SandboxProtocolError, match="transfers"):
        for download in downloads:
            await anext(download)
    for download in downloads:
        await download.aclose()
    assert len(await anext(session.download("file"))) == MEBIBYTE


async def test_a_file_that_shrinks_or_vanishes_during_a_download_is_sent_as_it_is(
    session: BrokerSession, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(10 * MEBIBYTE))
    download = session.download("file")
    await anext(download)
    file.unlink()
    assert sum([len(piece) async for piece in download]) == 9 * MEBIBYTE
    with pytest.raises(SandboxFileError):
        await anext(session.download("file"))


async def test_what_matplotlib_has_open_at_the_end_of_a_cell_is_shown_and_closed(session: BrokerSession) -> None:
    stand_in = """
import sys, types
class Figure:
    def savefig(self, file, **options): file.write(b"figure %d" % self.number)
Figure.__module__ = "matplotlib.figure"
class pyplot(types.ModuleType):
    figures = {}
    def get_fignums(self): return list(self.figures)
    def figure(self, number): return self.figures[number]
    def close(self, figure): self.figures.pop(figure.number)
    def new(self):
        figure = Figure()
        figure.number = len(self.figures)
        self.figures[figure.number] = figure
        return figure
plt = sys.modules["matplotlib.pyplot"] = pyplot("matplotlib.pyplot")
import os
os.environ["MPLBACKEND"]
"""
    assert (await session.python(stand_in, timeout=10)).value == "'Agg'"
    result = await session.python("plt.new(); plt.new(); 1 / 0", timeout=10)
    assert [picture.data for picture in result.pictures] == [b"figure 0", b"figure 1"]
    result = await session.python("plt.new()", timeout=10)
    assert [(picture.mime, picture.data) for picture in result.pictures] == [("image/png", b"figure 0")]
    assert (await session.python("plt.figures", timeout=10)).value == "{}"


async def test_more_requests_than_a_host_may_have_pending_end_its_connection(session: BrokerSession, tmp_path: Path) -> None:
    with channel.connect(tmp_path) as peer:
        peer.setblocking(True)
        peer.settimeout(10)
        peer.sendall(b"".join(encode({"id": n, "verb": "bash", "timeout": 60}, b"sleep 60") for n in range(1100)))
        with pytest.raises(ConnectionError):
            while peer.recv(1 << 16):
                pass
            raise ConnectionError
    assert (await session.bash("echo back", timeout=5)).output == "back\n"
