"""Gates for starts: how many pass at a time, over all processes of a node, and what is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from sandboxes.backends.gates import StartGates
from sandboxes.backends.host_processes import Mark
from sandboxes.backends.state import Place, StateDirectory
from sandboxes.errors import SandboxStartFailed
from sandboxes.options import NodeOptions
from sandboxes.protocol import HOST, Root, RootKind, SandboxSpec

IMAGE = Root(RootKind.SIF, "/images/one.sif", "sha256-1")
OTHER_IMAGE = Root(RootKind.SIF, "/images/two.sif", "sha256-2")

_HOLDER = """
import asyncio, sys
from pathlib import Path
from sandboxes.backends.gates import StartGates
from sandboxes.options import NodeOptions
from sandboxes.protocol import HOST
async def hold():
    async with StartGates(Path(sys.argv[1]), NodeOptions(starts=1)).passed(HOST):
        print("held", flush=True)
        await asyncio.sleep(600)
asyncio.run(hold())
"""


async def _most_at_once(gates: StartGates, roots: list[Root]) -> int:
    """How many of those that ask for these roots were inside together."""
    inside = most = 0

    async def start(root: Root) -> None:
        nonlocal inside, most
        async with gates.passed(root):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    await asyncio.gather(*map(start, roots))
    return most


async def test_no_more_than_the_nodes_number_start_at_a_time(tmp_path: Path):
    assert await _most_at_once(StartGates(tmp_path, NodeOptions(starts=3)), [HOST] * 12) == 3


async def test_no_more_than_the_images_number_start_from_one_image(tmp_path: Path):
    gates = StartGates(tmp_path, NodeOptions(starts=8, starts_per_image=2))
    assert await _most_at_once(gates, [IMAGE] * 8) == 2
    assert await _most_at_once(gates, [IMAGE, OTHER_IMAGE] * 6) == 4


async def test_the_gate_is_one_for_all_processes_and_outlives_none_of_them(tmp_path: Path):
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(SandboxStartFailed, match=r"no turn at the gate of this node \(1 starts at a time\) within 0\.05 s"):
            async with StartGates(tmp_path, NodeOptions(starts=1), timeout=0.05).passed(HOST):
                pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    async with asyncio.timeout(30), StartGates(tmp_path, NodeOptions(starts=1)).passed(HOST):
        pass


async def test_who_is_cancelled_while_waiting_takes_no_turn(tmp_path: Path):
    gates = StartGates(tmp_path, NodeOptions(starts=1))

    async def start() -> None:
        async with gates.passed(HOST):
            pytest.fail("a cancelled start went on")

    async with gates.passed(HOST):
        waiting = asyncio.create_task(start())
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(30), gates.passed(HOST):
        pass


class _Failing(StateDirectory):
    """Starts that fail with the given messages."""

    name = "failing"
    problems: list[str]
    tries = 0

    async def probe(self) -> Mapping[str, str]:
        return {}

    async def _check(self, spec: SandboxSpec, root: Root) -> None:
        pass

    def _launched(self, place: Place, spec: SandboxSpec, root: Root) -> AbstractAsyncContextManager[Mapping[str, str]]:
        return self._launch(place)

    @contextlib.asynccontextmanager
    async def _launch(self, place: Place) -> AsyncIterator[Mapping[str, str]]:
        (place.directory / "left").mkdir()  # fails where an earlier try was not cleaned up
        self.tries += 1
        raise SandboxStartFailed(self.problems.pop(0))
        yield {}

    def _mark(self, place: Place) -> Mark:
        return Mark(place.label, None, None)


@pytest.mark.parametrize(
    ("problems", "tries"),
    [
        (["fork: Resource temporarily unavailable", "mount: device or resource busy", "no such image"], 3),
        (["no such image"], 1),
        (["Cannot allocate memory"] * 9, 3),
    ],
)
async def test_only_what_passes_is_tried_again_and_not_for_ever(
    problems: list[str], tries: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    backend = _Failing(tmp_path)
    backend.problems = list(problems)
    with pytest.raises(SandboxStartFailed, match=problems[tries - 1]):
        await backend.start("x", SandboxSpec())
    assert backend.tries == tries
    assert len([record for record in caplog.records if "trying again" in record.message]) == tries - 1
    await backend.stop("x")
    assert await backend.list() == []
