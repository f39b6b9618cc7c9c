"""`prorl up` and `prorl demo` as a person runs them: what they print, how they end, what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from prorl_site.embedded.processes import free_port, wait_until

PRORL = str(Path(sys.executable).with_name("prorl"))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who set nothing but where to put things."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PRORL_", "DJANGO_"))}
    return {**clean, "PRORL_VAR_DIR": str(tmp_path / "var"), "PRORL_PORT": str(free_port())}


@contextmanager
def up(env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`prorl up`, ready for use."""
    with log.open("wb") as output, subprocess.Popen([PRORL, "up"], env=env, stdout=output, stderr=output) as process:
        try:
            ready = wait_until(lambda: process.poll() is not None or b"dashboard" in log.read_bytes(), timeout=60)
            assert ready, log.read_text()
            assert process.poll() is None, log.read_text()
            yield process
        finally:
            process.kill()


def processes_of(env: dict[str, str]) -> list[str]:
    """Command lines of all processes that run for this platform."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"PRORL_VAR_DIR={env['PRORL_VAR_DIR']}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # gone, or not ours
    return found


def test_the_demo_does_the_whole_job_and_leaves_nothing_running(env: dict[str, str], quick_model: str):
    command = [PRORL, "demo", "--exit"]
    done = subprocess.run(
        command, env={**env, "PRORL_LLM_URL": quick_model}, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    assert totals["ok"]
    assert totals["rollouts"] == totals["terminal"] == totals["token_exact"] == 48
    assert totals["reward_1"] > 0
    assert totals["mixed_groups"] > 0
    assert re.search(r"Log in as +admin", done.stdout)
    assert processes_of(env) == []


def test_ctrl_c_stops_everything_within_five_seconds(env: dict[str, str], tmp_path: Path):
    with up(env, tmp_path / "log") as process:
        url = f"http://127.0.0.1:{env['PRORL_PORT']}"
        assert httpx.get(f"{url}/login/").status_code == 200
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(10)
        assert time.monotonic() - begun < 5
    assert process.returncode == 0
    assert processes_of(env) == []


def test_nothing_survives_a_killed_supervisor(env: dict[str, str], tmp_path: Path):
    with up(env, tmp_path / "log") as process:
        process.kill()
        process.wait()
    assert wait_until(lambda: processes_of(env) == [], timeout=10), processes_of(env)


def test_other_commands_find_the_running_platform(env: dict[str, str], tmp_path: Path):
    with up(env, tmp_path / "log"):
        command = [sys.executable, "-m", "django", "showmigrations", "rollouts"]
        bare = {**env, "DJANGO_SETTINGS_MODULE": "prorl_site.settings"}
        shown = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=60, check=False)
        assert "[X] 0001_initial" in shown.stdout, shown.stderr
        left = (Path(env["PRORL_VAR_DIR"]) / "prorl.env").read_text()
        settings = dict(line.split("=", 1) for line in left.splitlines())
        assert httpx.get(f"http://127.0.0.1:{settings['PRORL_GATEWAY_PORT']}/readyz").json()["ready"]


def test_a_second_one_in_the_same_folder_says_so(env: dict[str, str], tmp_path: Path):
    with up(env, tmp_path / "log"):
        second = subprocess.run([PRORL, "up"], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert "already" in second.stderr
        assert "Traceback" not in second.stderr
