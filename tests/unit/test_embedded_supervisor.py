"""The supervisor, with small programs as services: order of stopping, restarts, failures to start, signals, one per folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prorl_site.embedded.processes import wait_until
from prorl_site.embedded.supervisor import STOP_SECONDS, AlreadyRunning, Service, ServiceFailed, Supervisor

# Writes its pid to the file argv[1], and its name and SIGTERM into the file argv[2] when it is stopped.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

def stop(*_):
    with open(sys.argv[2], "a") as journal:
        journal.write(f"{Path(sys.argv[1]).name} ")
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
Path(sys.argv[1]).write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""

STUBBORN = PROGRAM.replace("signal.signal(signal.SIGTERM, stop)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")

SUPERVISED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_embedded_supervisor import service
from prorl_site.embedded.supervisor import Supervisor
folder = Path(sys.argv[1])
with Supervisor(folder, say=lambda line: print(line, flush=True)) as supervisor:
    supervisor.start(service(folder, "database", stop_order=9), service(folder, "worker", program=sys.argv[3]))
    print("up", flush=True)
    supervisor.wait()
print("left", flush=True)
"""


def service(folder: Path, name: str, *, program: str = PROGRAM, **options) -> Service:
    pid_file = folder / name
    command = [sys.executable, "-c", program, str(pid_file), str(folder / "journal")]
    return Service(name=name, command=command, ready=lambda: pid(folder, name) > 0, **options)


def pid(folder: Path, name: str) -> int:
    """The pid that the service wrote, 0 until it has."""
    path = folder / name
    return int((path.exists() and path.read_text()) or 0)


def gone(process: int) -> bool:
    return wait_until(lambda: not Path(f"/proc/{process}").exists(), timeout=5)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, lines: list[str]):
    with Supervisor(tmp_path, say=lines.append) as supervisor:
        yield supervisor


def test_services_start_together_and_stop_in_order(tmp_path, supervisor, lines):
    supervisor.start(
        service(tmp_path, "database", stop_order=9), service(tmp_path, "web", stop_order=5), service(tmp_path, "worker")
    )
    pids = [pid(tmp_path, name) for name in ("database", "web", "worker")]
    assert [line.partition(" in ")[0] for line in lines] == ["database ready", "web ready", "worker ready"]

    supervisor.stop()

    assert (tmp_path / "journal").read_text().split() == ["worker", "web", "database"]
    assert lines[-1].startswith("stopped 3 services in")
    assert not any(Path(f"/proc/{process}").exists() for process in pids)


def test_a_crashed_service_is_started_again_and_said_so(tmp_path, supervisor, lines):
    supervisor.start(service(tmp_path, "worker"))
    first = pid(tmp_path, "worker")

    os.kill(first, signal.SIGKILL)

    assert wait_until(lambda: pid(tmp_path, "worker") not in (0, first), timeout=10)
    assert lines[1].startswith("worker ended with status 137, next start in 0.5 s")
    assert lines[2] == "worker started again"


def test_restarts_slow_down(tmp_path, supervisor, lines):
    marker = tmp_path / "started"
    # Ready once; every later start ends at once.
    program = f"import pathlib,time; m=pathlib.Path({str(marker)!r}); m.exists() or (m.touch(), time.sleep(0.3))"
    supervisor.start(Service(name="unlucky", command=[sys.executable, "-c", program], ready=marker.exists))

    assert wait_until(lambda: "next start in 2.0 s" in " ".join(lines), timeout=20)
    pauses = [line.split("next start in ")[1].split(" s")[0] for line in lines if "next start" in line]
    assert pauses[:3] == ["0.5", "1.0", "2.0"]


def test_a_service_that_ends_while_starting_fails_the_start_with_its_last_words(tmp_path, supervisor):
    command = [sys.executable, "-c", "import sys; sys.exit('no database there')"]

    with pytest.raises(ServiceFailed, match=r"web ended with status 1:\nno database there"):
        supervisor.start(Service(name="web", command=command, ready=lambda: False))


def test_a_service_that_is_not_ready_in_time_fails_the_start(tmp_path, supervisor):
    sleeper = Service(name="web", command=["sleep", "60"], ready=lambda: False, ready_seconds=0.3)

    with pytest.raises(ServiceFailed, match="web was not ready after"):
        supervisor.start(sleeper)


def test_a_second_supervisor_in_the_same_folder_is_refused_until_the_first_has_left(tmp_path):
    with Supervisor(tmp_path), pytest.raises(AlreadyRunning, match=rf"already running .*\(process {os.getpid()}\)"):
        Supervisor(tmp_path).__enter__()
    with Supervisor(tmp_path):
        pass


def supervised(folder: Path, program: str = PROGRAM) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, with all its services up."""
    command = [sys.executable, "-c", SUPERVISED, str(folder), str(Path(__file__).parent), program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    assert "up\n" in iter(process.stdout.readline, ""), "the supervisor ended early"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_in_order(tmp_path, number):
    process = supervised(tmp_path)
    pids = [pid(tmp_path, name) for name in ("database", "worker")]

    process.send_signal(number)
    output, _ = process.communicate(timeout=10)

    assert process.returncode == 0
    assert output.splitlines()[-1] == "left"
    assert (tmp_path / "journal").read_text().split() == ["worker", "database"]
    assert all(gone(process) for process in pids)


def test_a_service_that_does_not_stop_is_killed_in_time_for_the_database_to_stop_well(tmp_path):
    process = supervised(tmp_path, STUBBORN)
    begun = time.monotonic()

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)

    assert time.monotonic() - begun < STOP_SECONDS + 1
    assert "worker did not stop in time and was killed" in output
    assert (tmp_path / "journal").read_text().split() == ["database"]


def test_a_second_signal_kills_at_once(tmp_path):
    process = supervised(tmp_path, STUBBORN)
    begun = time.monotonic()

    process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # two signals sent together arrive as one
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)

    assert time.monotonic() - begun < 2
    assert "killing everything" in output


def test_nothing_survives_a_killed_supervisor_and_the_folder_is_free_again(tmp_path):
    process = supervised(tmp_path)
    pids = [pid(tmp_path, name) for name in ("database", "worker")]

    process.kill()
    process.communicate()

    assert all(gone(process) for process in pids)
    with Supervisor(tmp_path):
        pass
