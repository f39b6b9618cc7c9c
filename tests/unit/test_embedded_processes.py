"""Leashed programs: nothing of them outlives their owner, and what they detached survives only their own crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_site.embedded.processes import LeashedProcess, free_port, port_answers, wait_until

# A program with a child that left its session and was orphaned. Prints both pids, then sleeps.
FAMILY = """
import os, subprocess, time
detached = subprocess.Popen(["setsid", "sleep", "60"])
print(os.getpid(), detached.pid, flush=True)
time.sleep(60)
"""

STOPS_BY_ITSELF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(os.environ["GREETING"], flush=True)
time.sleep(60)
"""

OWNER = """
import sys, time
from pathlib import Path
from prorl_site.embedded.processes import LeashedProcess
process = LeashedProcess([sys.executable, "-c", sys.argv[2]], log=Path(sys.argv[1]))
print(process.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int) -> bool:
    return wait_until(lambda: not any(map(alive, pids)), timeout=5)


def pids_in(log: Path, count: int = 2) -> list[int]:
    assert wait_until(lambda: log.exists() and len(log.read_text().split()) >= count, timeout=10)
    return [int(word) for word in log.read_text().split()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log" / "program.log"


def test_exit_status_and_output_are_those_of_the_program(log):
    process = LeashedProcess(["sh", "-c", "echo out; echo err >&2; exit 7"], log=log, env={"X": "1"})

    assert process.wait(10)
    assert process.poll() == 7
    assert process.log_tail() == "out\nerr"
    process.kill()


def test_its_last_words_are_its_own(log):
    for word in ("first", "second"):
        process = LeashedProcess(["echo", word], log=log)
        process.wait(10)
        process.kill()

    assert process.log_tail() == "second"
    assert log.read_text() == "first\nsecond\n"


def test_a_program_that_cannot_start_says_so(log):
    process = LeashedProcess(["/no/such/program"], log=log)

    assert process.wait(10)
    assert process.poll() == 127
    assert "/no/such/program: No such file or directory" in process.log_tail()
    process.kill()


def test_it_gets_the_environment_and_the_signals(log):
    process = LeashedProcess([sys.executable, "-c", STOPS_BY_ITSELF], log=log, env={"GREETING": "hello"})
    assert wait_until(lambda: log.exists() and "hello" in log.read_text(), timeout=10)

    process.signal(signal.SIGTERM)

    assert process.wait(10)
    assert process.poll() == 3
    process.kill()


def test_kill_takes_detached_descendants_too(log):
    process = LeashedProcess([sys.executable, "-c", FAMILY], log=log)
    pids = pids_in(log)

    process.kill()

    assert not any(map(alive, pids))


def test_an_orderly_stop_takes_detached_descendants_too(log):
    process = LeashedProcess([sys.executable, "-c", FAMILY], log=log)
    pids = pids_in(log)

    process.signal(signal.SIGTERM)

    assert process.wait(10)
    assert process.poll() == 128 + signal.SIGTERM
    assert not any(map(alive, pids))
    process.kill()


def test_what_it_detached_survives_its_crash(log):
    process = LeashedProcess([sys.executable, "-c", FAMILY], log=log)
    program, detached = pids_in(log)

    os.kill(program, signal.SIGKILL)

    assert process.wait(10)
    assert process.poll() == 128 + signal.SIGKILL
    process.kill()
    assert alive(detached)
    os.kill(detached, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["owner", "leash"])
def test_nothing_survives_a_kill_of_the_owner_or_of_the_leash(tmp_path, log, victim):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log), FAMILY], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    leash = int(owner.stdout.readline())
    program, detached = pids_in(log)

    os.kill(owner.pid if victim == "owner" else leash, signal.SIGKILL)

    assert gone(leash, program)
    if victim == "owner":
        assert gone(detached)
    else:
        os.kill(detached, signal.SIGKILL)  # the orphan of a killed leash is beyond anyone's reach but ours
    owner.kill()
    owner.communicate()


def test_a_free_port_does_not_answer():
    assert not port_answers(free_port())
