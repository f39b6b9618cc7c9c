"""`manage.py sandbox_selfcheck`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sandboxes


def test_it_names_the_backends_that_there_are(tmp_path: Path) -> None:
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
