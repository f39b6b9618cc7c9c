"""Root file systems: reading SIF files, paths in images that nobody vouches for, and sharing what is mounted or unpacked."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.roots import squashfuse
from sandboxes.backends.roots.identity import identity_files
from sandboxes.backends.roots.inside import resolved, text_of
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.roots.shared import SharedRoots
from sandboxes.backends.roots.sif import NotSif, Partition, root_partition, write_sif
from sandboxes.errors import SandboxStartFailed
from sandboxes.protocol import Root, RootKind, SandboxSpec
from sandboxes.selfcheck.samples import FACT, TEXT, directory_root, sif_root


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    squashfs = tmp_path / "squashfs"
    squashfs.write_bytes(b"hsqs" + b"x" * 10_000)
    write_sif(squashfs, tmp_path / "image.sif")
    return tmp_path / "image.sif"


def test_a_sif_file_says_where_its_file_system_is(sif: Path) -> None:
    partition = root_partition(sif)
    assert partition == Partition(4096, 10_004)
    assert sif.read_bytes()[partition.offset :].startswith(b"hsqs")


def test_sif_files_that_are_cut_off_anywhere_are_refused(sif: Path) -> None:
    whole = sif.read_bytes()
    for length in (0, 10, 127, 128, 400, 712, 4096, len(whole) - 1):
        sif.write_bytes(whole[:length])
        with pytest.raises(NotSif, match=r"image\.sif"):
            root_partition(sif)


@pytest.mark.parametrize(
    ("offset", "data", "problem"),
    [
        (32, b"ELF", "not a SIF file"),
        (42, b"99", "not a SIF file of version 01"),
        (88, b"\xff" * 8, "makes no sense"),
        (128, b"\0\0\0\0", "no root file system"),
        (128 + 201, b"\x05", "not squashfs"),
    ],
)
def test_other_files_are_refused_with_what_is_wrong(sif: Path, offset: int, data: bytes, problem: str) -> None:
    whole = bytearray(sif.read_bytes())
    whole[offset : offset + len(data)] = data
    sif.write_bytes(whole)
    with pytest.raises(NotSif, match=problem):
        root_partition(sif)


def test_paths_in_an_image_stay_in_it_whatever_its_links_say(tmp_path: Path) -> None:
    for name in ("etc", "real/etc", "usr/home"):
        (tmp_path / name).mkdir(parents=True)
    for name, target in {
        "etc/passwd": "/../../../real/etc/passwd",
        "etc/up": "../../../../real",
        "home": "usr/home",
        "etc/circle": "circle",
        "etc/group": "hosts",
        "real/etc/passwd": "../../etc/group",
    }.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "etc/hosts").write_text("a file")
    assert resolved(tmp_path, "/etc/passwd") == "/etc/hosts"
    assert resolved(tmp_path, "/etc/up/etc") == "/real/etc"
    assert resolved(tmp_path, "/home/agent") == "/usr/home/agent"
    assert resolved(tmp_path, "/home/agent", within=("/home",)) == "/home/agent"
    assert resolved(tmp_path, "/new/../new/er") == "/new/er"
    for path, problem in {"/etc/circle/x": "circle", "/etc/hosts/x": "not a directory"}.items():
        with pytest.raises(SandboxStartFailed, match=problem):
            resolved(tmp_path, path)


def test_only_regular_files_of_an_image_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").symlink_to(Path(__file__))
    assert text_of(tmp_path, "/pipe") == text_of(tmp_path, "/secret") == text_of(tmp_path, "/none") == ""


def test_the_agent_comes_first_among_the_users_of_an_image(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:5:5::/:/bin/false\n\nlast:x:9:9::/:/bin/sh")
    files = identity_files(tmp_path, 1000, "/home/agent")
    assert files["/etc/passwd"].splitlines() == [
        "agent:x:1000:1000:agent:/home/agent:/bin/sh",
        "root:x:0:0::/root:/bin/sh",
        "last:x:9:9::/:/bin/sh",
    ]
    assert identity_files(tmp_path, 0, "/home/agent")["/etc/passwd"].splitlines() == [
        "root:x:0:0:root:/home/agent:/bin/sh",
        "agent:x:5:5::/:/bin/false",
        "last:x:9:9::/:/bin/sh",
    ]


async def test_a_directory_that_cannot_be_a_root_is_refused_with_the_fix(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path / "state")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    roots = {str(tmp_path / "none"): "not the absolute path of a directory", "relative": "not the absolute path"}
    if os.geteuid() == 0:
        roots |= {str(closed): "chmod o\\+x", "/usr": "belongs to user 0.*chown"}
    for path, problem in roots.items():
        with pytest.raises(SandboxStartFailed, match=problem):
            await backend.start("x", SandboxSpec(), Root(RootKind.DIRECTORY, path))
    assert await backend.list() == []
    with pytest.raises(SandboxStartFailed, match="too short for a SIF file"):
        (tmp_path / "empty.sif").touch()
        await backend.start("x", SandboxSpec(), Root(RootKind.SIF, str(tmp_path / "empty.sif")))
    await backend.stop("x")


async def test_links_in_an_image_do_not_lead_to_files_of_the_host(image: Path, public: Path, tmp_path: Path) -> None:
    victim = public / "victim"
    victim.mkdir()
    (victim / "passwd").write_text("precious")
    for path in (victim, victim / "passwd"):
        path.chmod(0o777)
    shutil.rmtree(image / "etc")
    (image / "etc").symlink_to(f"/oldroot{victim}")
    for name in ("tmp", "proc", "dev"):
        (image / name).rmdir()
        (image / name).symlink_to(f"../../oldroot{victim}/{name}")
    backend = BubblewrapBackend(tmp_path / "state")
    await backend.start("x", SandboxSpec(), Root(RootKind.DIRECTORY, str(image)))
    try:
        session = await backend.connect("x")
        result = await session.bash(f"cat /etc/passwd; echo x > /tmp/passwd; cat {victim}/passwd", timeout=10)
        assert "agent:x:1000" in result.output
        await session.close()
    finally:
        await backend.stop("x")
    assert (victim / "passwd").read_text() == "precious"
    assert [path.name for path in victim.iterdir()] == ["passwd"]


@pytest.mark.parametrize(("lacking", "is_used"), [("nothing", "True"), ("_json", "False")])
async def test_python_is_the_images_own_if_that_has_all_that_is_needed(
    lacking: str, is_used: str, image: Path, tmp_path: Path
) -> None:
    program = image / "opt/venv/bin/python3"
    program.parent.mkdir(parents=True)
    lent = "/.prorl/lib/ld-* --library-path /.prorl/lib /.prorl/bin/python3"
    code = f"import sys; sys.of_image, sys.modules['{lacking}'] = True, None; code = sys.argv[2]; del sys.argv[1:3]; exec(code)"
    program.write_text(f'#!/bin/sh\nexec {lent} -c "{code}" "$@"\n')
    program.chmod(0o755)
    backend = BubblewrapBackend(tmp_path / "state")
    root = Root(RootKind.DIRECTORY, str(image), env=(("PATH", "/opt/venv/bin:/bin"),))
    await backend.start("x", SandboxSpec(), root)
    try:
        session = await backend.connect("x")
        assert (await session.python("import sys; hasattr(sys, 'of_image')", timeout=20)).value == is_used
        await session.close()
    finally:
        await backend.stop("x")


async def test_the_brokers_own_files_cannot_be_moved_away_by_an_agent_that_may_change_the_image(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path / "state")
    await backend.start("x", SandboxSpec(fakeroot=True), directory_root())
    try:
        session = await backend.connect("x")
        result = await session.bash("mv /.prorl /x; rm -rf /.prorl; echo x > /.prorl/broker.pyz; mkdir /.prorl/new", timeout=10)
        assert result.exit_code != 0
        assert result.output.count("Read-only file system") + result.output.count("busy") >= 3, result.output
        assert (await session.python("1 + 1", timeout=20)).value == "2"
        await session.close()
    finally:
        await backend.stop("x")


async def test_one_mount_serves_all_sandboxes_of_a_sif_file_and_goes_with_the_last(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path / "state")
    assert (await backend.probe())["sif"] == "squashfuse"
    root = sif_root()
    try:
        await asyncio.gather(*(backend.start(name, SandboxSpec(), root) for name in ("one", "two")))
        assert len(_mounts(root)) == len(_squashfuses(root)) == 1
        await backend.stop("one")
        session = await backend.connect("two")
        assert (await session.bash(f"cat {FACT}", timeout=5)).output == TEXT
        await session.close()
    finally:
        await asyncio.gather(backend.stop("one"), backend.stop("two"))
    assert _mounts(root) == []
    while _squashfuses(root):
        await asyncio.sleep(0.01)


def test_a_mount_whose_program_was_killed_is_replaced(shared: SharedRoots) -> None:
    root = sif_root()
    shared.hold(Path(root.path), root.digest).close()
    (pid,) = _squashfuses(root)
    os.kill(pid, signal.SIGKILL)
    while _squashfuses(root):
        time.sleep(0.01)
    with contextlib.closing(shared.hold(Path(root.path), root.digest)) as held:
        assert (held.directory / FACT.lstrip("/")).read_text() == TEXT
        shared.sweep()
        assert held.directory.is_mount()
        (pid,) = _squashfuses(root)
        os.kill(pid, signal.SIGKILL)
        while _squashfuses(root):
            time.sleep(0.01)
    shared.sweep()
    assert not held.directory.exists()


def test_what_cannot_be_unmounted_holds_up_nothing(shared: SharedRoots, public: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = sif_root()
    stuck = shared.hold(Path(root.path), "stuck")
    stuck.close()
    squashfuse.unmount(stuck.directory)
    (stuck.directory / "something").touch()  # like a mount that stays, it cannot be removed
    held = shared.hold(Path(root.path), root.digest)
    held.close()
    shared.sweep()
    assert not held.directory.exists()
    assert f"{stuck.directory} stays mounted" in caplog.text
    (stuck.directory / "something").unlink()


def test_what_a_process_held_is_free_when_it_ends(shared: SharedRoots) -> None:
    root = sif_root()
    held = shared.hold(Path(root.path), root.digest)
    with subprocess.Popen(["sleep", "600"], pass_fds=[held.fd]) as holder:
        held.close()
        shared.sweep()
        assert held.directory.is_mount()
        holder.kill()
    shared.sweep()
    assert not held.directory.exists()


@pytest.fixture
def no_squashfuse(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = shutil.which("unsquashfs")
    assert program is not None
    (public / "bin").mkdir()
    (public / "bin/unsquashfs").symlink_to(program)
    monkeypatch.setenv("PATH", str(public / "bin"))


@pytest.mark.usefixtures("no_squashfuse")
def test_where_sif_files_cannot_be_mounted_they_are_unpacked_once(shared: SharedRoots) -> None:
    assert shared.how() == "unpacked"
    root = sif_root()
    with contextlib.closing(shared.hold(Path(root.path), root.digest)) as held:
        assert (held.directory / FACT.lstrip("/")).read_text() == TEXT
        owner = sandbox_user()
        assert held.directory.stat().st_uid == (os.geteuid() if owner is None else owner)
        before = held.directory.stat().st_ino
    shared.sweep()
    with contextlib.closing(shared.hold(Path(root.path), root.digest)) as held:
        assert held.directory.stat().st_ino == before


@pytest.mark.usefixtures("no_squashfuse")
def test_unpacked_files_that_nobody_uses_make_room_for_others(public: Path) -> None:
    shared = SharedRoots(public / "roots", sandbox_user(), unpacked_bytes=1)
    path = Path(sif_root().path)
    used = shared.hold(path, "used")
    unused = shared.hold(path, "unused")
    unused.close()
    third = shared.hold(path, "third")
    assert used.directory.exists()
    assert not unused.directory.exists()
    used.close()
    third.close()


def test_a_sif_file_that_neither_mounts_nor_unpacks_says_why(
    tmp_path: Path, shared: SharedRoots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "squashfuse is not installed" in shared.how()
    with pytest.raises(SandboxStartFailed, match=r"squashfuse is not installed; unsquashfs is not installed"):
        shared.hold(Path(sif_root().path), "x")


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that any user can enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def shared(public: Path) -> Iterator[SharedRoots]:
    shared = SharedRoots(public / "roots", sandbox_user())
    yield shared
    shared.sweep()


def _mounts(root: Root) -> list[str]:
    key = hashlib.sha256(root.digest.encode()).hexdigest()[:24]
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if key in line]


def _squashfuses(root: Root) -> list[int]:
    """Pids of the programs that have the file open."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(entry.readlink()) == root.path:
                found.add(int(entry.parts[2]))
    return sorted(found)


@pytest.fixture
def image(public: Path) -> Path:
    """A copy of the sample, to be spoilt."""
    subprocess.run(["cp", "-a", directory_root().path, str(public / "image")], check=True)
    return public / "image"
