"""`manage.py dispatch`: hints in order, rescue of lost rollouts, health of LLM servers. Run one or more; one is at work."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any

import psycopg
from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connection

from prorl_site.celery import app
from rollouts.services.dispatch import due_hints, unmark
from rollouts.services.reap import reap
from rollouts.services.servers import probe_servers
from rollouts.services.transition import DISPATCH_CHANNEL

logger = logging.getLogger(__name__)

# Any 64-bit number that nothing else in this database uses as an advisory lock.
_LOCK = 0x70726F726C
_RECONNECT_SECONDS = 1.0


class Command(BaseCommand):
    help = "Publish hints to workers, take back what lost workers held, probe LLM servers."

    stopping = False
    next_probe = 0.0

    def handle(self, *args: Any, **options: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self.stopping:
            try:
                with psycopg.connect(**_connection_parameters(), autocommit=True) as lines:
                    self._lead(lines)
            except psycopg.OperationalError as error:
                logger.warning("the database does not answer; trying again: %s", error)
                time.sleep(_RECONNECT_SECONDS)

    def _stop(self, *_: Any) -> None:
        self.stopping = True

    def _lead(self, lines: psycopg.Connection[Any]) -> None:
        """Wait to be the one dispatcher, then work until told to stop or the connection (and with it the lock) is lost."""
        while not self.stopping and not lines.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK]).fetchone()[0]:  # type: ignore[index]
            time.sleep(settings.DISPATCH_SECONDS)
        lines.execute(f"LISTEN {DISPATCH_CHANNEL}")
        while not self.stopping:
            self._guarded(reap)
            self._guarded(publish_due)
            if time.monotonic() >= self.next_probe:
                self._guarded(probe_servers)
                self.next_probe = time.monotonic() + settings.PROBE_SECONDS
            for _ in lines.notifies(timeout=settings.DISPATCH_SECONDS, stop_after=1):
                pass  # what happened is read from the tables; the notice only ends the wait

    def _guarded(self, step: Callable[[], Any]) -> None:
        """One failing step must not keep the others from running."""
        try:
            step()
        except Exception:
            logger.exception("%s failed; the next round tries again", step.__name__)
        finally:
            connection.close()


def publish_due() -> None:
    """Send a message for everything that is due. What the broker refuses becomes due again."""
    hints = due_hints()
    if not hints:
        return
    sent = 0
    try:
        with app.producer_or_acquire() as producer:
            for hint in hints:
                app.send_task(f"rollouts.{hint.stage.value}", args=[str(hint.rollout_id)], queue=hint.queue, producer=producer)
                sent += 1
    finally:
        if sent < len(hints):
            unmark(hints[sent:])


def _connection_parameters() -> dict[str, Any]:
    parameters = connection.get_connection_params()
    return {name: value for name, value in parameters.items() if name not in ("context", "cursor_factory")}
