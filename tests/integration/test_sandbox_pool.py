"""Warm sandboxes: what is kept, handed over, and never kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.errors import SandboxLost
from sandboxes.pool import WarmPool
from sandboxes.protocol import HOST, Backend, Limits, Root, RootKind, SandboxSpec

_SECONDS = 60.0


@dataclass
class Notes:
    """A ledger that a test can read: name -> what was noted last."""

    state: dict[str, str] = field(default_factory=dict)

    async def started(self, name: str, image: str) -> None:
        self.state[name] = "started"

    async def ready(self, name: str, enforced: Mapping[str, str]) -> None:
        assert self.state[name] == "started"
        assert enforced
        self.state[name] = "ready"

    async def released(self, name: str) -> None:
        self.state[name] = "released"

    async def stopped(self, name: str, reason: str) -> None:
        self.state[name] = reason


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return BubblewrapBackend(tmp_path)


@contextlib.asynccontextmanager
async def running_pool(backend: Backend, notes: Notes) -> AsyncIterator[WarmPool]:
    """A pool that runs during the block; everything is gone after it."""
    pool = WarmPool(backend, notes)
    task = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for name in await backend.list():
            await backend.stop(name)


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"waited {_SECONDS:g} s for {what}")


async def output_of(backend: Backend, name: str, command: str) -> str:
    session = await backend.connect(name)
    try:
        return (await session.bash(command, timeout=20)).output
    finally:
        await session.close()


async def test_the_first_request_fills_the_pool_and_later_ones_are_served_from_it(backend: Backend) -> None:
    notes = Notes()
    async with running_pool(backend, notes) as pool:
        assert await pool.take("first", SandboxSpec(), HOST, target=2) is None
        await until(lambda: pool.sizes == {"": 2}, "two warm sandboxes")
        spec = SandboxSpec(env={"GREETING": "hello"})
        info = await pool.take("second", spec, HOST, target=2)
        assert info is not None
        assert info.name == "second"
        assert await output_of(backend, "second", "echo $GREETING") == "hello\n"
        assert "handed over to second" in notes.state.values()
        await until(lambda: pool.sizes == {"": 2}, "the pool to be full again")


async def test_a_warm_sandbox_serves_only_requests_of_its_kind(backend: Backend) -> None:
    notes = Notes()
    async with running_pool(backend, notes) as pool:
        await pool.take("first", SandboxSpec(), HOST, target=1)
        await until(lambda: pool.sizes == {"": 1}, "a warm sandbox")
        other = SandboxSpec(limits=Limits(processes=7))
        assert await pool.take("second", other, HOST, target=1) is None
        changed = ["no longer wanted", "ready"]
        await until(lambda: sorted(notes.state.values()) == changed, "the pool to change to what is asked for now")
        await until(lambda: pool.sizes == {"": 1}, "it to be taken in")
        info = await pool.take("third", other, HOST, target=1)
        assert info is not None
        assert await output_of(backend, "third", "ulimit -u") == "7\n"


async def test_a_large_environment_is_left_to_a_start(backend: Backend) -> None:
    async with running_pool(backend, Notes()) as pool:
        await pool.take("first", SandboxSpec(), HOST, target=1)
        await until(lambda: pool.sizes == {"": 1}, "a warm sandbox")
        assert await pool.take("second", SandboxSpec(env={"BIG": "x" * 5000}), HOST, target=1) is None
        assert pool.sizes == {"": 1}


async def test_a_target_of_zero_empties_the_pool(backend: Backend) -> None:
    notes = Notes()
    async with running_pool(backend, notes) as pool:
        await pool.take("first", SandboxSpec(), HOST, target=1)
        await until(lambda: pool.sizes == {"": 1}, "a warm sandbox")
        await pool.take("second", SandboxSpec(limits=Limits(processes=7)), HOST, target=0)
        await until(lambda: "no longer wanted" in notes.state.values(), "it to be stopped")
        assert pool.sizes == {}


async def test_a_warm_sandbox_that_died_is_not_handed_over(backend: Backend) -> None:
    async with running_pool(backend, Notes()) as pool:
        await pool.take("first", SandboxSpec(), HOST, target=1)
        await until(lambda: pool.sizes == {"": 1}, "a warm sandbox")
        [name] = await backend.list()
        await backend.stop(name)
        assert await pool.take("second", SandboxSpec(), HOST, target=1) is None
        with pytest.raises(SandboxLost):
            await backend.connect("second")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_warm_sandbox_that_does_not_answer_is_not_handed_over(backend: Backend, number: signal.Signals) -> None:
    notes = Notes()
    async with running_pool(backend, notes) as pool:
        await pool.take("first", SandboxSpec(), HOST, target=1)
        await until(lambda: pool.sizes == {"": 1}, "a warm sandbox")
        [warm] = await backend.list()
        os.kill(json.loads((backend.state_dir / warm / "sandbox.json").read_text())["pid"], number)
        async with asyncio.timeout(30):
            assert await pool.take("second", SandboxSpec(), HOST, target=0) is None
        await until(lambda: notes.state[warm].startswith("was of no use"), "it to be stopped")


async def test_requests_for_ever_new_kinds_do_not_end_the_pool(backend: Backend) -> None:
    async with running_pool(backend, Notes()) as pool:
        await pool.take("first", SandboxSpec(), HOST, target=2)
        await until(lambda: pool.sizes == {"": 2}, "two warm sandboxes")
        for number in range(20):
            other = SandboxSpec(limits=Limits(processes=20 + number))
            taken = asyncio.create_task(pool.take(f"other-{number}", other, HOST, target=2))
            await asyncio.sleep(0.001 * (number % 4))
            await taken
        await until(lambda: pool.sizes == {"": 2}, "the pool to be full again")


async def test_broken_images_and_failing_notes_hold_up_no_other_image(backend: Backend) -> None:
    class Forgetful(Notes):
        async def started(self, name: str, image: str) -> None:
            if image == "sha256-unnoted":
                raise ConnectionError("no database")
            await super().started(name, image)

    async with running_pool(backend, Forgetful()) as pool:
        for number in range(10):
            root = Root(RootKind.DIRECTORY, "/nonexistent", f"sha256-{number}")
            await pool.take("broken", SandboxSpec(image=f"broken{number}"), root, target=1)
        await pool.take("unnoted", SandboxSpec(image="unnoted"), Root(RootKind.DIRECTORY, "/", "sha256-unnoted"), target=1)
        await pool.take("sound", SandboxSpec(), HOST, target=1)
        await until(lambda: pool.sizes[""] == 1, "a warm sandbox of the sound one")


async def test_a_cancelled_hand_over_destroys_the_sandbox(backend: Backend) -> None:
    notes = Notes()
    async with running_pool(backend, notes) as pool:
        await pool.take("first", SandboxSpec(), HOST, target=1)
        await until(lambda: pool.sizes == {"": 1}, "a warm sandbox")
        [warm] = await backend.list()
        hand_over = asyncio.create_task(pool.take("second", SandboxSpec(env={"A": "b"}), HOST, target=0))
        await asyncio.sleep(0)  # it now waits for the sandbox to take the variable
        hand_over.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hand_over
        await until(lambda: notes.state[warm] == "the hand-over was cancelled", "the sandbox to be stopped")
        assert await backend.list() == []


async def test_the_end_of_the_worker_leaves_nothing(backend: Backend) -> None:
    notes = Notes()
    async with running_pool(backend, notes) as pool:
        await pool.take("first", SandboxSpec(), HOST, target=2)
        await until(lambda: pool.sizes == {"": 2}, "warm sandboxes")
    assert set(notes.state.values()) == {"the worker ends"}
    assert await backend.list() == []
