"""An installation below a home directory that is closed to others serves a platform that runs as root."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandboxes.backends.bwrap_program import find_bwrap
from sandboxes.protocol import Bind, SandboxSpec
from sandboxes.registry import get_backend


async def test_bubblewrap_and_binds_may_lie_where_the_sandboxes_user_cannot_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    shutil.copy(find_bwrap(None)[0], home / "bin" / "bwrap")
    (home / "package").mkdir()
    (home / "package" / "fact.txt").write_text("seen")
    home.chmod(0o700)
    monkeypatch.setenv("PATH", str(home / "bin"), prepend=":")
    backend = get_backend("bubblewrap", tmp_path / "state")
    assert (await backend.probe())["binary"] == str(home / "bin" / "bwrap")
    try:
        await backend.start("closed", SandboxSpec(binds=(Bind(str(home / "package"), "/opt/package"),)))
        session = await backend.connect("closed")
        result = await session.bash("cat /opt/package/fact.txt; touch /opt/package/x 2>&1 | grep -o Read-only", timeout=10)
        await session.close()
    finally:
        await backend.stop("closed")
    assert result.output.split() == ["seen", "Read-only"]
