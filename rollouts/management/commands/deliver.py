"""`manage.py deliver`: tells webhook receivers of what ended. A process of its own, so that slow ones delay nothing else."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import OperationalError

from prorl_site.garbage import collect_rarely
from rollouts.services.delivery import Sending, endpoints_with_work, note_answer, take_due
from rollouts.services.delivery_events import record_events
from rollouts.services.delivery_http import Poster
from rollouts.services.feed import BATCH
from rollouts.worker.database import Database

logger = logging.getLogger(__name__)

_AT_ONCE = 8  # messages on their way to one endpoint
_PATIENCE_SECONDS = 60.0


class Command(BaseCommand):
    help = "Send webhooks. Run one or more; they share the work."

    def handle(self, *args: Any, **options: Any) -> None:
        collect_rarely()
        asyncio.run(Deliverer().run())


class Deliverer:
    """Turns finished rollouts into messages and sends what is due, until it is told to stop."""

    def __init__(self) -> None:
        self._database = Database(patience=_PATIENCE_SECONDS)
        self._on_its_way: Counter[UUID] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        async with Poster(allow_private=settings.WEBHOOK_ALLOW_PRIVATE) as self._poster:
            while not self._stopping:
                self._wake.clear()
                try:
                    await self._record()
                    await self._send_due()
                except OperationalError as error:
                    logger.warning("a round failed; the next one tries again: %s", error)
                except Exception:
                    logger.exception("a round failed; the next one tries again")
                await self._pause()
            for task in self._tasks:
                task.cancel()  # what was taken and not noted becomes due again
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._database.close()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def _pause(self) -> None:
        """Until something may have become due, or a message has left room for another."""
        try:
            async with asyncio.timeout(settings.WEBHOOK_POLL_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _record(self) -> None:
        while not self._stopping and await self._database.call(record_events) == BATCH:
            pass

    async def _send_due(self) -> None:
        for endpoint_id in await self._database.call(endpoints_with_work):
            room = _AT_ONCE - self._on_its_way[endpoint_id]
            if room <= 0:
                continue
            for sending in await self._database.call(take_due, endpoint_id=endpoint_id, limit=room):
                self._on_its_way[endpoint_id] += 1
                task = asyncio.create_task(self._send(sending))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _send(self, sending: Sending) -> None:
        try:
            answer = await self._poster.post(
                sending.url, message_id=sending.message_id, body=sending.body, secrets=sending.secrets
            )
            await self._database.insist(note_answer, sending=sending, answer=answer)
        except Exception:
            logger.exception("message %s: could not note what came of it", sending.message_id)
        finally:
            self._on_its_way[sending.endpoint_id] -= 1
            self._wake.set()
