"""The broker's watchdog as far as it needs no sandbox: what a tree of files on a disk takes, floods, wall time.

The rest is in `sandboxes.selfcheck.hogs`.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes import channel
from sandboxes.errors import LimitExceeded
from sandboxes.session import BrokerSession
from tests.unit.conftest import start_broker


@pytest.fixture
def broker(bundle: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """It counts what is in the directory `tree` of its home: 16 MiB at most."""
    (tmp_path / "tree").mkdir()
    limits = {"disk_mb": 16, "flood_mb": 1, "file_size_mb": 64}
    process = start_broker(bundle, tmp_path, limits=limits, writable={"disk": [str(tmp_path / "tree")]})
    yield process
    process.kill()
    process.wait()


def writing(*sizes: int, then: str = "sleep 600") -> str:
    files = "; ".join(f"head -c {size}M /dev/zero > tree/$RANDOM$RANDOM" for size in sizes)
    return f"cd; {files}; {then}"


async def test_a_tree_that_grows_too_large_ends_the_command(session: BrokerSession):
    result = await session.bash(writing(10, 10), timeout=60)
    assert (result.limit_exceeded, result.exit_code) == ("disk_mb", None)
    assert (await session.bash("echo back", timeout=20)).output == "back\n"


async def test_many_small_files_and_directories_count(session: BrokerSession):
    make = "cd; for d in $(seq 40); do mkdir tree/$d; for f in $(seq 20); do head -c 30K /dev/zero > tree/$d/$f; done; done"
    assert (await session.bash(f"{make}; sleep 600", timeout=60)).limit_exceeded == "disk_mb"


async def test_links_to_a_file_do_not_count_again(session: BrokerSession):
    link = "for i in $(seq 20); do ln tree/[0-9]* tree/link$i; done 2>/dev/null"
    result = await session.bash(writing(8, then=f"{link}; ls tree | wc -l; sleep 2"), timeout=60)
    assert (result.limit_exceeded, result.output) == ("", "21\n")


async def test_open_files_count_that_were_removed(session: BrokerSession):
    keep = "exec 7> tree/kept; rm tree/kept; head -c 20M /dev/zero >&7; sleep 600"
    assert (await session.bash(f"cd; {keep}", timeout=60)).limit_exceeded == "disk_mb"


async def test_what_was_reported_counts_no_more_until_it_grows(session: BrokerSession):
    assert (await session.bash(writing(20), timeout=60)).limit_exceeded == "disk_mb"
    assert (await session.bash("sleep 3", timeout=60)).limit_exceeded == ""
    assert (await session.bash(writing(20), timeout=60)).limit_exceeded == "disk_mb"


async def test_what_the_background_writes_is_told_to_the_next_command(session: BrokerSession):
    assert (await session.bash(f"({writing(20)}) >/dev/null 2>&1 &", timeout=60)).exit_code == 0
    async with asyncio.timeout(60):
        while not (await session.bash("sleep 0.1", timeout=20)).limit_exceeded:
            pass
    assert (await session.bash("jobs", timeout=20)).limit_exceeded == ""


async def test_a_flood_from_the_background_is_ended(session: BrokerSession):
    await session.bash("yes &", timeout=60)
    async with asyncio.timeout(60):
        while (await session.bash("sleep 0.1", timeout=20)).limit_exceeded != "flood_mb":
            pass
    result = await session.bash("pgrep -P $$ -x yes || echo gone", timeout=20)
    assert result.output.endswith("gone\n")


async def test_nothing_is_served_after_the_wall_time(bundle: Path, tmp_path: Path):
    process = start_broker(bundle, tmp_path, limits={"wall_seconds": 0.5})
    try:
        session = await BrokerSession.open("test", channel.connect(tmp_path))
        requests = (session.bash("sleep 600", timeout=60), session.python("while True: pass", timeout=60))
        for ended in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(ended, LimitExceeded)
            assert ended.limit == "wall_seconds"
        await session.close()
        later = await BrokerSession.open("test", channel.connect(tmp_path))
        with pytest.raises(LimitExceeded, match=r"ended after 0\.5 s"):
            await later.read_file("/etc/passwd")
        await later.close()
    finally:
        process.kill()
        process.wait()
