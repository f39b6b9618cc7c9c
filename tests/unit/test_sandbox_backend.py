"""The bubblewrap backend's own decisions; what every backend must do is in the conformance suite."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.host_processes import Mark, end_marked
from sandboxes.backends.state import remove_tree
from sandboxes.errors import BackendUnavailable, SandboxExists, SandboxLost, SandboxStartFailed
from sandboxes.protocol import Bind, SandboxSpec
from sandboxes.registry import get_backend


def test_unknown_backends_are_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="known: apptainer, bubblewrap"):
        get_backend("docker", tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "-x", "a\0b", "x" * 200])
async def test_names_that_are_no_plain_directory_names_are_refused(name: str, tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path)
    for call in (backend.stop(name), backend.connect(name), backend.start(name, SandboxSpec())):
        with pytest.raises(ValueError, match="not a sandbox name"):
            await call
    assert await backend.list() == []


@pytest.mark.parametrize(
    "target", ["/", "relative", "/proc", "/dev/null", "/etc/passwd", "/usr/lib", "/run/x", "/home/agent", "/a/../etc"]
)
async def test_binds_over_what_isolation_relies_on_are_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxStartFailed, match="bind target"):
        await BubblewrapBackend(tmp_path).start("x", SandboxSpec(binds=(Bind("/usr", target),)))


async def test_missing_bind_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxStartFailed, match="/no/such/path"):
        await BubblewrapBackend(tmp_path).start("x", SandboxSpec(binds=(Bind("/no/such/path", "/data"),)))


async def test_files_of_a_sandbox_are_private(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path / "state")
    await backend.start("x", SandboxSpec())
    try:
        for path in (tmp_path / "state", tmp_path / "state" / "x"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
    finally:
        await backend.stop("x")


async def test_state_directories_may_be_longer_than_a_socket_address(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["directory-with-a-long-name"] * 8)
    backend = BubblewrapBackend(deep)
    await backend.start("x", SandboxSpec())
    try:
        session = await backend.connect("x")
        assert (await session.bash("echo ok", timeout=5)).output == "ok\n"
        await session.close()
    finally:
        await backend.stop("x")


async def test_a_directory_without_a_record_is_listed_and_removed(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path)
    (tmp_path / "half-started").mkdir()
    assert await backend.list() == ["half-started"]
    with pytest.raises(SandboxLost):
        await backend.connect("half-started")
    await backend.stop("half-started")
    assert await backend.list() == []


async def test_sandboxes_outlive_the_process_that_started_them(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom sandboxes.protocol import SandboxSpec\n"
        "from sandboxes.registry import get_backend\n"
        "asyncio.run(get_backend('bubblewrap', Path(sys.argv[1])).start('x', SandboxSpec()))\n"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program, str(tmp_path)], check=True)
    backend = BubblewrapBackend(tmp_path)
    session = await backend.connect("x")
    assert (await session.bash("echo alive", timeout=5)).output == "alive\n"
    await session.close()
    await backend.stop("x")


async def test_a_renamed_sandbox_is_known_by_its_new_name_only(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path)
    await backend.start("warm-1", SandboxSpec())
    session = await backend.connect("warm-1")
    await backend.rename("warm-1", "prorl-7-1")
    assert await backend.list() == ["prorl-7-1"]
    assert (await session.bash("echo open sessions go on", timeout=5)).exit_code == 0
    await session.close()
    with pytest.raises(SandboxLost):
        await backend.connect("warm-1")
    await (await backend.connect("prorl-7-1")).close()
    await backend.start("warm-1", SandboxSpec())
    await asyncio.gather(backend.stop("warm-1"), backend.stop("prorl-7-1"))
    assert await backend.list() == []


async def test_a_rename_takes_no_name_that_is_in_use_and_needs_a_sandbox(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path)
    await backend.start("one", SandboxSpec())
    (tmp_path / "two").mkdir()
    with pytest.raises(SandboxExists, match="two"):
        await backend.rename("one", "two")
    with pytest.raises(SandboxLost, match="three"):
        await backend.rename("three", "four")
    with pytest.raises(ValueError, match="not a sandbox name"):
        await backend.rename("one", "../one")
    assert await backend.list() == ["one", "two"]
    await (await backend.connect("one")).close()
    await backend.stop("one")


def test_directories_that_were_closed_by_an_agent_can_be_removed() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o777)
        with _ordinary_user():
            (base / "tree" / "closed" / "deep").mkdir(parents=True)
            (base / "tree" / "closed" / "deep" / "file").write_text("x")
            (base / "outside").mkdir(mode=0o500)
            (base / "tree" / "link").symlink_to(base / "outside")
            (base / "tree" / "closed" / "deep").chmod(0)
            (base / "tree" / "closed").chmod(0)
            remove_tree(base / "tree")
        assert [path.name for path in base.iterdir()] == ["outside"]
        assert stat.S_IMODE((base / "outside").stat().st_mode) == 0o500


@contextlib.contextmanager
def _ordinary_user() -> Iterator[None]:
    """File permissions count for this thread, also when the tests run as root."""
    libc, own = ctypes.CDLL(None), os.geteuid()
    libc.setfsuid(54321 if own == 0 else own)
    try:
        yield
    finally:
        libc.setfsuid(own)


def test_a_process_that_took_over_a_recorded_pid_is_spared() -> None:
    with _process("sleep", "600") as stranger:
        namespace = Path(f"/proc/{stranger.pid}/ns/pid").stat().st_ino
        assert end_marked(Mark("prorl-sandbox-0", stranger.pid, namespace), timeout=1) == []
        assert stranger.poll() is None


def test_a_marked_process_is_killed_and_waited_for() -> None:
    with _process(sys.executable, "-c", "import time; time.sleep(600)", "prorl-sandbox-1") as process:
        assert end_marked(Mark("prorl-sandbox-1", None, None), timeout=5) == []
        assert process.wait(5) == -9


@contextlib.contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose arguments can be seen, which they cannot while it begins."""
    process = subprocess.Popen(command)
    try:
        while command[-1].encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0"):
            assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait()
