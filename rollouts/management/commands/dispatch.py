"""`manage.py dispatch`: hints in order, and everything that has to happen now and then. Run one or more; one is at work."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import psycopg
from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import OperationalError, connection

from prorl_site.celery import app
from prorl_site.database import own_connection
from prorl_site.garbage import collect_rarely
from rollouts.services.announcements import release_abandoned_holds
from rollouts.services.cancel import finish_cancels
from rollouts.services.dispatch import MAINTENANCE_QUEUE, due_hints, end_waits, unmark
from rollouts.services.metering import meter
from rollouts.services.overtaken import end_gone
from rollouts.services.reap import reap
from rollouts.services.rescoring import take_back_rescorings
from rollouts.services.retention import prune
from rollouts.services.server_health import probe_due
from rollouts.services.tallies import keep_tallies
from rollouts.services.transition import DISPATCH_CHANNEL
from rollouts.services.usage import keep_accounts
from rollouts.services.weight_updates import update_weights
from sandboxes.images.services.builds import note_news, take_back_lost_builds

logger = logging.getLogger(__name__)

# Any 64-bit number that nothing else in this database uses as an advisory lock.
_LOCK = 0x70726F726C
_RECONNECT_SECONDS = 1.0


class Step(NamedTuple):
    """Something to do again `seconds` after it was last done. It may be cut short at any point and must be safe to repeat."""

    name: str
    function: Callable[[], Any]
    seconds: float


def announce_builds() -> None:
    """Wake a maintenance worker. Without the message it looks by itself, a little later."""
    if note_news():
        app.send_task("rollouts.maintain", queue=MAINTENANCE_QUEUE)


def send_traces() -> None:
    """Imported only where it is wanted: OpenTelemetry is an extra, and large."""
    from prorl_site.tracing import export_traces

    export_traces()


STEPS = (
    Step("end waits", end_waits, 0.25),
    Step("rescue", reap, 1.0),
    Step("finish cancels", finish_cancels, 2.0),
    Step("take back rescorings", take_back_rescorings, 2.0),
    Step("count use, stop at budgets", keep_accounts, 1.0),
    Step("announce builds of images", announce_builds, 0.5),
    Step("take back builds of images", take_back_lost_builds, 5.0),
    Step("probe LLM servers", partial(probe_due, live=True), min(1.0, settings.PROBE_SECONDS)),
    Step("probe those that failed", partial(probe_due, live=False), min(1.0, settings.PROBE_SECONDS)),
    Step("update weights", update_weights, 0.25),
    Step("release holds", release_abandoned_holds, 5.0),
    Step("end what no server will serve", end_gone, 10.0),
    Step("count what finished", meter, 2.0),
    Step("sum up runs", keep_tallies, 2.0),
    Step("prune", prune, 3600.0),
    *([Step("send traces", send_traces, 2.0)] if settings.OTEL_ENDPOINT else []),
)


class Command(BaseCommand):
    help = "Publish hints to workers, take back what lost workers held, probe LLM servers."

    stopping = False

    def handle(self, *args: Any, **options: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        collect_rarely()
        while not self.stopping:
            try:
                with own_connection() as lines:
                    self._wait_for_the_lead(lines)
                    self._lead(lines)
            except psycopg.OperationalError as error:
                logger.warning("the database does not answer; trying again: %s", error)
                time.sleep(_RECONNECT_SECONDS)

    def _stop(self, *_: Any) -> None:
        self.stopping = True

    def _wait_for_the_lead(self, lines: psycopg.Connection[Any]) -> None:
        while not self.stopping and not lines.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK]).fetchone()[0]:  # type: ignore[index]
            time.sleep(settings.DISPATCH_SECONDS)

    def _lead(self, lines: psycopg.Connection[Any]) -> None:
        """Be the one dispatcher until told to stop or the connection (and with it the lock) is lost.

        Steps have threads of their own: a model server that hangs while it is probed must not hold back hints.
        """
        over = threading.Event()
        for step in STEPS:
            threading.Thread(target=_repeat, args=(step, over), name=step.name, daemon=True).start()
        lines.execute(f"LISTEN {DISPATCH_CHANNEL}")
        try:
            while not self.stopping:
                begun = time.monotonic()
                _guarded("dispatch", publish_due)
                _wait_for_news(lines, begun + settings.DISPATCH_MIN_SECONDS)
        finally:
            over.set()


def _repeat(step: Step, over: threading.Event) -> None:
    while not over.is_set():
        _guarded(step.name, step.function)
        over.wait(step.seconds)


def _guarded(name: str, function: Callable[[], Any]) -> None:
    """One failure must not end the others, nor this one's next try."""
    try:
        function()
    except OperationalError as error:
        logger.warning("%s failed; trying again: %s", name, error)
    except Exception:
        logger.exception("%s failed; trying again", name)
    finally:
        connection.close()


def _wait_for_news(lines: psycopg.Connection[Any], not_before: float) -> None:
    """Until something has changed, but not before the given moment: one round answers all the notices that came meanwhile.

    Notices carry nothing; what happened is read from the tables.
    """
    for _ in lines.notifies(timeout=settings.DISPATCH_SECONDS, stop_after=1):
        pass
    time.sleep(max(0.0, not_before - time.monotonic()))
    for _ in lines.notifies(timeout=0):
        pass


def publish_due() -> None:
    """Send a message for everything that is due. What the broker refuses becomes due again."""
    hints = due_hints()
    if not hints:
        return
    sent = 0
    try:
        with app.producer_or_acquire() as producer:
            for hint in hints:
                ids = [str(id_) for id_ in hint.rollout_ids]
                app.send_task(f"rollouts.{hint.stage.value}", args=[ids], queue=hint.queue, producer=producer)
                sent += 1
    finally:
        if sent < len(hints):
            unmark(hints[sent:])
