"""The Celery application. Postgres is the queue of record; messages are hints that carry one id (docs/adr/0002)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.signals import setup_logging
from kombu.asynchronous import get_event_loop

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "prorl_site.settings")

from django.conf import settings

from prorl_site.garbage import collect_rarely


def _broker() -> dict[str, Any]:
    if settings.BROKER_URL:
        return {
            "broker_url": settings.BROKER_URL,
            "broker_transport_options": {"confirm_publish": True},
            "broker_heartbeat": 30,
        }
    from prorl_site.embedded.broker import filesystem_broker_settings

    return filesystem_broker_settings(settings.BROKER_DIR)


app = Celery("prorl_site")
app.conf.update(
    **_broker(),
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    # Late ack and prefetch 1: a worker process takes no more messages than it has free threads.
    task_acks_late=True,
    task_reject_on_worker_lost=False,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    task_default_queue_type="classic",
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    task_publish_retry=True,
    task_publish_retry_policy={"max_retries": 2, "interval_start": 0.1, "interval_max": 0.5},
    worker_enable_remote_control=False,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    worker_send_task_events=False,
    # Its restoring step talks to the broker from a job's thread: after a lost connection a worker then stands still for ever.
    worker_enable_prefetch_count_reduction=False,
    task_track_started=False,
)
app.autodiscover_tasks(["rollouts"])


def wake_celery() -> None:
    """Have a worker's loop look around now. From its own thread, where signal handlers run, nothing wakes it from its sleep."""
    if hub := get_event_loop():
        threading.Thread(target=hub.call_soon, args=(int,)).start()


@setup_logging.connect
def _keep_our_logging(**_: Any) -> None:
    """Connecting this signal is how Celery is told to leave logging alone."""


def run_worker(hostname: str, *, queue: str, threads: int, begin: Callable[[], None] | None = None) -> int:
    """Take jobs from `queue` in this process until SIGTERM; returns the exit code.

    `begin` starts what the process takes up by itself, whether the broker answers or not. It is called once SIGTERM stops
    the worker in good order: before that a SIGTERM just ends the process, and what it had taken up would be left lying.
    """
    collect_rarely()

    class Worker(app.Worker):  # type: ignore[name-defined,misc]
        def on_start(self) -> None:
            super().on_start()
            if begin is not None:
                begin()

    worker = Worker(
        hostname=hostname,
        pool="threads",
        concurrency=threads,
        queues=[queue],
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker.start()
    return int(worker.exitcode or 0)
