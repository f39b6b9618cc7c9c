"""Where Celery and a worker process meet: Celery supervises and brings hints, `WorkerProcess` does the work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

from celery.signals import worker_ready, worker_shutting_down

from prorl_site.celery import app, run_worker, wake_celery
from rollouts.lifecycle import Stage
from rollouts.services.dispatch import queue_name

from .process import WorkerProcess

# Threads that take hints. They wait for a free slot, never for a rollout, so two keep any number of slots busy.
_THREADS = 2

_worker: WorkerProcess | None = None


def serve(*, stage: Stage, node: str, concurrency: int) -> int:
    """Run a worker of one stage in this process until SIGTERM; returns the exit code."""
    global _worker
    _worker = WorkerProcess(stage=stage, node=node, concurrency=concurrency)
    _worker.start()
    worker_shutting_down.connect(_stop)
    worker_ready.connect(_drain_on_usr1)
    return run_worker(f"{stage.value}@{node}", queue=queue_name(stage, node), threads=_THREADS)


def take(rollout_ids: list[str]) -> None:
    """The body of every job. Ends when the rollouts are in the hands of the loop, which carries them out."""
    if _worker is None:
        raise RuntimeError("rollout jobs run in a process started by `manage.py work`")
    _worker.take([UUID(id_) for id_ in rollout_ids])


def _drain_on_usr1(sender: Any, **_: Any) -> None:
    """Slurm and its like say with SIGUSR1 that the end is near. Only now, since Celery has a handler of its own for it."""

    def drain(*_: Any) -> None:
        if _worker is None:
            return
        for queue in list(app.amqp.queues.consume_from):
            # Another process of this stage and node may take the hints.
            _soon(sender.call_soon, sender.cancel_task_queue, queue)
        _worker.drain(done=lambda: os.kill(os.getpid(), signal.SIGTERM))

    signal.signal(signal.SIGUSR1, drain)


def _stop(**_: Any) -> None:
    """Before Celery waits for its threads: the rollouts go back and the threads come free at once."""
    try:
        if _worker is not None:
            _worker.stop()
    finally:
        wake_celery()


def _soon(call: Callable[..., Any], *args: Any) -> None:
    """Have Celery's loop do something now. From its own thread, where signal handlers run, nothing wakes it from its sleep."""
    threading.Thread(target=call, args=args).start()
