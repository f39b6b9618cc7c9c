"""Ending Apptainer instances by the titles of their processes, which anybody can give to a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.backends.apptainer.instances import Instances
from sandboxes.backends.apptainer.program import Program
from sandboxes.backends.state import Place

NAME = "prorl-00000000-one"
OTHER_USER = 54321


@pytest.fixture
def place(tmp_path: Path) -> Place:
    directory = tmp_path / "one"
    directory.mkdir()
    (directory / "instance").write_text(NAME)
    return Place(directory, "label")


@contextlib.contextmanager
def titled(name: str, user: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the title of an instance, in a session of its own."""
    script = f'exec -a "Apptainer instance: root [{name}]" cat'
    process = subprocess.Popen(["bash", "-c", script], stdin=subprocess.PIPE, start_new_session=True, user=user)
    try:
        while b"Apptainer" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()[:9]:
            assert process.poll() is None
        yield process
    finally:
        process.communicate()


def test_all_sessions_with_the_name_are_ended_and_no_others(place: Place) -> None:
    instances = Instances(place.directory.parent, Program("/apptainer", "apptainer", "1.4", "", configurable=True), None)
    with titled(NAME) as real, titled(NAME) as forged, titled(NAME + "2") as other, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(titled(NAME, OTHER_USER))] if os.geteuid() == 0 else []
        assert instances.end(place, 5.0) == []
        assert (real.wait(5), forged.wait(5)) == (-9, -9)
        assert [process.poll() for process in (other, *strangers)] == [None] * (1 + len(strangers))
