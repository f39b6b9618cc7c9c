"""Files that the sandboxes of a user share: made whole or not at all, and refused with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes.backends import staging
from sandboxes.backends.apptainer.backend import ApptainerBackend
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.launch import INTERPRETER
from sandboxes.backends.staging import make_once
from sandboxes.errors import BackendUnavailable
from sandboxes.options import NodeOptions
from sandboxes.protocol import SandboxSpec


def test_a_directory_is_made_once_and_open_to_all(tmp_path: Path) -> None:
    made = []

    def fill(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("whole")

    target = tmp_path / "target"
    assert make_once(target, fill) == make_once(target, fill) == target
    assert (target / "file").read_text() == "whole"
    assert target.stat().st_mode & 0o777 == 0o755
    assert len(made) == 1


def test_whoever_comes_second_takes_what_the_first_has_made(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def fill(folder: Path) -> None:
        target.mkdir()
        (target / "file").write_text("of the first")

    make_once(target, fill)
    assert (target / "file").read_text() == "of the first"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_what_does_not_become_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "part").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(BackendUnavailable, match=r"cannot be made in .*No space left on device"):
        make_once(tmp_path / "target", fill)
    assert list(tmp_path.iterdir()) == []


async def test_a_shared_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_SHARED", tmp_path / "missing")
    backend = BubblewrapBackend(tmp_path / "state")
    with pytest.raises(BackendUnavailable, match=f"{tmp_path}/missing/prorl-binds-{os.geteuid()}"):
        await backend.start("x", SandboxSpec())
    await backend.stop("x")
    assert await backend.list() == []


async def test_a_state_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BackendUnavailable, match=r"no sandbox can be started in .*/file/state: .*Not a directory"):
        await BubblewrapBackend(tmp_path / "file/state").start("x", SandboxSpec())


def test_programs_are_not_shown_from_where_none_may_run(tmp_path: Path) -> None:
    build = f"from sandboxes.backends.roots.runtime import build_runtime, Path; build_runtime('{INTERPRETER}', b'', Path('.'))"
    script = 'mount -t tmpfs -o noexec none "$0" && cd "$0" && exec "$@"'
    run = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, tmp_path, sys.executable, "-c", build],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "BackendUnavailable: images need programs of the host in ., which is mounted noexec" in run.stderr


async def test_sandboxes_can_be_stopped_where_apptainer_is_gone(tmp_path: Path) -> None:
    backend = ApptainerBackend(tmp_path, NodeOptions(apptainer="/gone"))
    with pytest.raises(BackendUnavailable, match="/gone"):
        await backend.start("x", SandboxSpec())
    (tmp_path / "x").mkdir()
    assert await backend.list() == ["x"]
    await backend.stop("x")
    assert await backend.list() == []


async def test_a_sandbox_whose_record_the_host_took_down_with_it_is_removed(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/sandbox.json").touch()
    await backend.stop("x")
    assert await backend.list() == []
