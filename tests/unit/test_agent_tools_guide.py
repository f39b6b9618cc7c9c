"""The code in the guide to tools works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollouts.engine.tools import ToolResult, describe_tools
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.errors import SandboxFileError
from sandboxes.protocol import SandboxSpec

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "agent-tools.md"


def block_with(name: str, guide: Path = GUIDE) -> dict[str, Any]:
    """What the block of the guide that defines `name` defines."""
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    [code] = [block for block in blocks if re.search(rf"(def|class) {name}\b", block)]
    defined: dict[str, Any] = {}
    exec(compile(code, guide.name, "exec", dont_inherit=True), defined)  # noqa: S102 - our own
    return defined


async def test_files_of_any_size_get_in_and_out(tmp_path: Path) -> None:
    guide = block_with("give")
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 4096 * 30)  # 30 MiB
    backend = BubblewrapBackend(tmp_path / "state")
    await backend.start("x", SandboxSpec())
    try:
        session = await backend.connect("x")
        await guide["give"](session, source, "data/big.bin")
        assert (await session.bash("stat -c %s data/big.bin", timeout=20)).output == f"{source.stat().st_size}\n"
        await guide["take"](session, "data/big.bin", target, 40 * 1024 * 1024)
        assert target.read_bytes() == source.read_bytes()
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            await guide["take"](session, "data/big.bin", target, 1000)
        with pytest.raises(SandboxFileError):
            await guide["take"](session, "data/none", target, 1000)
        await session.ping()
        await session.close()
    finally:
        await backend.stop("x")


async def test_the_tool_is_one() -> None:
    guide = block_with("LookupArguments")
    tool = guide["LookupTool"]({"RL": "reinforcement learning"})
    assert '"word"' in describe_tools([tool]) and "What to look up." in describe_tools([tool])
    found = await tool.call(guide["LookupArguments"](word="RL"), timeout=1)
    assert found == ToolResult("reinforcement learning")
    assert "not in the glossary" in (await tool.call(guide["LookupArguments"](word="x"), timeout=1)).error
