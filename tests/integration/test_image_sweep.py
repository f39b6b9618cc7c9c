"""What killed maintenance workers left running is stopped."""

from __future__ import annotations

from pathlib import Path

from rollouts.worker.maintenance import stop_strays
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.protocol import SandboxSpec


async def test_a_stray_that_does_not_end_keeps_no_other(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path)
    await backend.start("b", SandboxSpec())
    (tmp_path / "a").mkdir()
    (tmp_path / "a/sandbox.json").mkdir()  # whatever is wrong with it
    await stop_strays(backend, {"a", "b"})
    assert await backend.list() == ["a"]
