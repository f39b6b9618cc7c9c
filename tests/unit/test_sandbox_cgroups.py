"""Control groups: what is found, written and removed. A directory tree stands in where this machine delegates no controller."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes import channel
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.bundle import build_bundle
from sandboxes.backends.bwrap_program import find_bwrap
from sandboxes.backends.cgroups import Delegation, find_delegation, remove_group
from sandboxes.backends.enforcement import Enforcement, release
from sandboxes.backends.host_processes import end_marked
from sandboxes.backends.launch import INTERPRETER, Base, Host, launch, read_mark
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.state import Place
from sandboxes.errors import LimitExceeded, SandboxLost
from sandboxes.protocol import Limits, SandboxSpec
from sandboxes.session import BrokerSession

ALL = frozenset({"cpu", "memory", "pids"})


class Tree:
    """A mounted hierarchy with one group in it, and the /proc/self of a process there."""

    def __init__(
        self, folder: Path, group: str = "unit", *, offered: str = "cpuset cpu io memory pids", enabled: str = "cpu memory pids"
    ) -> None:
        self.mount = folder / "mount"
        self.group = self.mount / group
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.group.mkdir(parents=True)
        for name, text in {"controllers": offered, "procs": "", "subtree_control": enabled}.items():
            (self.group / f"cgroup.{name}").write_text(text)
        self.place(f"/{group}")

    def place(self, path: str, root: str = "/") -> None:
        (self.proc / "cgroup").write_text(f"4:memory:/elsewhere\n0::{path}\n")
        (self.proc / "mountinfo").write_text(
            f"31 23 0:28 / {self.mount}/v1 rw - cgroup cgroup rw,memory\n"
            f"41 31 0:38 {root} {self.mount} rw - cgroup2 cgroup2 rw\n"
        )


@pytest.fixture
def whole(tmp_path: Path) -> Tree:
    """The group is the top of what is mounted, as in a container."""
    tree = Tree(tmp_path, "")
    tree.place("/")
    return tree


class TestFinding:
    def test_the_top_of_what_is_mounted_is_ours(self, whole: Tree):
        found = find_delegation(whole.proc)
        assert found is not None
        assert found.directory == whole.mount

    def test_goes_below_a_mount_of_a_part_of_the_tree(self, whole: Tree):
        whole.place("/job_7/step_0", root="/job_7/step_0")
        found = find_delegation(whole.proc)
        assert found is not None
        assert found.directory == whole.mount

    def test_workers_that_moved_find_the_same_group(self, whole: Tree):
        whole.place("/prorl-workers")
        found = find_delegation(whole.proc)
        assert found is not None
        assert found.directory == whole.mount

    def test_offers_the_controllers_that_are_enabled(self, tmp_path: Path):
        tree = Tree(tmp_path, "", offered="io memory pids", enabled="io memory pids")
        tree.place("/")
        found = find_delegation(tree.proc)
        assert found is not None
        assert found.controllers == {"memory", "pids"}

    def test_nothing_without_a_controller_of_use(self, tmp_path: Path):
        tree = Tree(tmp_path, "", offered="hugetlb")
        tree.place("/")
        assert find_delegation(tree.proc) is None

    def test_nothing_where_none_can_be_enabled(self, tmp_path: Path):
        tree = Tree(tmp_path, "", enabled="")
        tree.place("/")
        assert find_delegation(tree.proc) is None

    def test_nothing_in_the_first_version(self, whole: Tree):
        (whole.proc / "cgroup").write_text("4:memory:/elsewhere\n")
        assert find_delegation(whole.proc) is None

    def test_nothing_outside_of_what_is_mounted(self, whole: Tree):
        whole.place("/../other", root="/job_7")
        assert find_delegation(whole.proc) is None

    def test_a_group_that_is_not_delegated_is_left_alone(self, tmp_path: Path):
        tree = Tree(tmp_path)
        if os.geteuid() != 0:
            (tree.group / "cgroup.procs").chmod(0o444)
        assert find_delegation(tree.proc) is None
        assert not (tree.group / "prorl-workers").exists()


class TestGroupOfASandbox:
    def test_has_the_limits(self):
        settings = Delegation(Path("/delegated"), ALL).settings(Limits(memory_mb=100, processes=20, cpus=1.5))
        with_broker = str(164 * 1024 * 1024)
        expected = {"memory.max": with_broker, "memory.swap.max": "0", "pids.max": "24", "cpu.max": "150000 100000"}
        assert settings == expected

    def test_has_only_those_that_can_be_held(self):
        assert set(Delegation(Path("/delegated"), frozenset({"pids", "cpu"})).settings(Limits())) == {"pids.max"}


async def test_a_sandbox_that_the_kernel_ended_for_its_memory_exceeded_a_limit(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path / "state")
    group = tmp_path / "group"
    for directory in (group, backend.state_dir / "one"):
        directory.mkdir(parents=True)
    (backend.state_dir / "one" / "control_group").write_text(str(group))
    for kills, expected in ((0, SandboxLost), (1, LimitExceeded)):
        (group / "memory.events").write_text(f"low 0\nmax {kills}\noom {kills}\noom_kill {kills}\noom_group_kill 0\n")
        with pytest.raises(expected):
            await backend.connect("one")


def real_tree() -> Path | None:
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(fields[1]) for fields in lines if fields[2] == "cgroup2" and os.access(fields[1], os.W_OK)), None)


@pytest.mark.skipif(real_tree() is None, reason="no control groups that this user may write to")
def test_a_real_group_is_entered_killed_and_removed(tmp_path: Path) -> None:
    tree = real_tree()
    assert tree is not None
    delegation = Delegation(tree, frozenset())
    label = f"prorl-test-{os.getpid()}"
    directory = tree / label
    try:
        with contextlib.ExitStack() as stack:
            group = delegation.create(label, Limits(), tmp_path, stack)
            enter = f"import os, time; os.write({group.procs}, b'0'); print('in', flush=True); time.sleep(600)"
            process = subprocess.Popen([sys.executable, "-c", enter], stdout=subprocess.PIPE, pass_fds=[group.procs])
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        assert (directory / "cgroup.procs").read_text().split() == [str(process.pid)]
        process.stdout.close()
    finally:
        remove_group(tmp_path)
    assert process.wait() == -9
    assert not directory.exists()
    remove_group(tmp_path)  # again is fine


def test_a_group_whose_name_found_no_room_on_the_disk_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "control_group").touch()
    monkeypatch.chdir(tmp_path)
    remove_group(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["control_group"]


@pytest.mark.skipif(real_tree() is None, reason="no control groups that this user may write to")
async def test_a_sandbox_lives_in_its_group_until_it_is_stopped(tmp_path: Path) -> None:
    tree = real_tree()
    assert tree is not None
    user = sandbox_user()
    bwrap, version = find_bwrap(user)
    enforcement = Enforcement(Delegation(tree, frozenset()), filters_system_calls=True)
    host = Host(bwrap, version, build_bundle(INTERPRETER), user, enforcement)
    place = Place(tmp_path, f"prorl-sandbox-test-{os.getpid()}")
    group = tree / place.label
    try:
        with launch(host, place, SandboxSpec(), Base()):
            session = await BrokerSession.open("test", channel.connect(tmp_path))
            await session.bash("sleep 600 &", timeout=20)
            assert len((group / "cgroup.procs").read_text().split()) == 3  # the broker, bash, sleep
            await session.close()
        assert end_marked(read_mark(place), 5.0) == []
    finally:
        release(place)
    assert not group.exists()
    release(place)  # again is fine
