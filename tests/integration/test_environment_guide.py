"""The guide's environment is real: installed as the guide says, it passes the conformance kit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "environments.md"
TASKS = [{"text": "a b a", "word": "a"}, {"text": "none here", "word": "x"}]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which the guide's package is installed."""
    # The first block of each language; dict() keeps the last of equal keys.
    blocks = dict(reversed(re.findall(r"```(python|toml)\n(.*?)```", GUIDE.read_text(), re.DOTALL)))
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "count.py").write_text(blocks["python"])
    metadata = tmp_path / "my_package-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    name, target = re.search(r'^(\S+) = "(.+)"$', blocks["toml"], re.MULTILINE).groups()
    (metadata / "entry_points.txt").write_text(f"[prorl.environments]\n{name} = {target}\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def check(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "django", "check_environment", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_it_passes_the_conformance_kit(installed: dict[str, str], tmp_path: Path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, TASKS)))
    done = check(installed, "count-words", "--tasks", str(tasks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed, 0 failed" in done.stdout


def test_a_task_it_refuses_is_reported(installed: dict[str, str], tmp_path: Path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"text": "a", "word": ""}))
    done = check(installed, "count-words", "--tasks", str(tasks))
    assert done.returncode == 1
    assert "there is no word to count" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense", "--tasks", "{tasks}"], "no environment is named 'nonsense'"),
        (["arithmetic", "--tasks", "{tasks}", "--config", "{"], "--config is not JSON"),
        (["arithmetic", "--tasks", "{tasks}", "--config", '{"x": 1}'], "/x"),
        (["arithmetic", "--tasks", "/nonexistent"], "--tasks /nonexistent"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: list[str], message: str):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"a": 1, "b": 2}')
    done = check(dict(os.environ), *(a.replace("{tasks}", str(tasks)) for a in arguments))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
