"""A Celery worker of the platform as a process: it stops in good order from the moment it takes something up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import os, signal, sys
import django
django.setup()
from celery.signals import worker_shutting_down
from prorl_site.celery import run_worker, wake_celery

def give_back(**_):
    print("given back", flush=True)
    wake_celery()

worker_shutting_down.connect(give_back)
begin = lambda: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(run_worker("w@test", queue="q", threads=1, begin=begin))
"""


def test_a_worker_that_is_stopped_as_it_begins_gives_back_what_it_took_up(tmp_path: Path) -> None:
    env = os.environ | {"PRORL_VAR_DIR": str(tmp_path), "PRORL_BROKER_URL": ""}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("given back") == 1
