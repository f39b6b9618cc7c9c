"""Settings come from documented variables, and a bad value is refused by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
SOURCES = [CLONE / "prorl_site" / name for name in ("settings.py", "env.py", "local.py", "demo/model.py")]


def test_every_variable_is_in_the_example_file_and_the_other_way_round():
    read = set(re.findall(r"PRORL_[A-Z_]+", "".join(path.read_text() for path in SOURCES)))
    documented = set(re.findall(r"^# (PRORL_[A-Z_]+)=", (CLONE / ".env.example").read_text(), re.MULTILINE))
    read -= {"PRORL_SECRET_KEY_FILE"}  # of any variable, explained once
    assert documented == read


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PRORL_LEASE_SECONDS", "soon", "is not a number"),
        ("PRORL_LEASE_SECONDS", "0.1", "is below 1"),
        ("PRORL_DB_POOL_SIZE", "2.5", "is not a whole number"),
        ("PRORL_DEBUG", "maybe", "is not a switch"),
        ("PRORL_SECRET_KEY_FILE", "/nonexistent", "cannot be read"),
        ("PRORL_SECRET_KEY", "", "is not set"),
        ("PRORL_DATABASE_URL", "sqlite:///x", "must be a postgres:// URL"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: str, message: str, tmp_path: Path):
    env = {"PATH": os.environ["PATH"], "PRORL_SECRET_KEY": "x", "PRORL_VAR_DIR": str(tmp_path), name: value}
    done = subprocess.run(
        [sys.executable, "-c", "import prorl_site.settings"], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert re.search(f"{name.removesuffix('_FILE')}.*{message}", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check"], "manage.py: PRORL_SECRET_KEY is not set."),
        (["sandbox_selfcheck", "chroot"], "CommandError: unknown sandbox backend 'chroot'"),  # a host is examined without one
    ],
)
def test_a_host_on_which_nothing_is_set_up_is_told_so_in_a_line(arguments: list[str], message: str, tmp_path: Path):
    env = {"PATH": os.environ["PATH"], "PRORL_VAR_DIR": str(tmp_path)}
    command = [sys.executable, str(CLONE / "manage.py"), *arguments]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
