"""Waiting for rows to change: one query a tick for all who wait, and no thread or database connection for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Generic, NamedTuple, TypeVar
from uuid import UUID

from django.db import connection

logger = logging.getLogger(__name__)

FactT = TypeVar("FactT")

# A look may take this share of the time, at most: where it is slow, it is rarer.
_LARGEST_SHARE = 0.1


class _Waiter(NamedTuple, Generic[FactT]):
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[FactT]
    is_news: Callable[[FactT], bool]


class Watch(Generic[FactT]):
    """Looks at rows every `seconds` while somebody waits for one, in a thread of its own that ends with the last of them."""

    def __init__(self, look: Callable[[Collection[UUID]], Mapping[UUID, FactT]], *, seconds: float) -> None:
        """`look` reads what is known now of some ids in one query; it may leave ids out."""
        self._look = look
        self._seconds = seconds
        self._lock = threading.Lock()
        self._waiters: dict[UUID, list[_Waiter[FactT]]] = {}
        self._is_running = False

    async def news(self, id_: UUID, is_news: Callable[[FactT], bool], *, timeout: float) -> FactT | None:
        """The fact about `id_` as soon as `is_news` holds for it; None when it did not within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        waiter: _Waiter[FactT] = _Waiter(loop, loop.create_future(), is_news)
        self._add(id_, waiter)
        try:
            async with asyncio.timeout(timeout):
                return await waiter.future
        except TimeoutError:
            return None
        finally:
            self._remove(id_, waiter)

    def _add(self, id_: UUID, waiter: _Waiter[FactT]) -> None:
        with self._lock:
            self._waiters.setdefault(id_, []).append(waiter)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _remove(self, id_: UUID, waiter: _Waiter[FactT]) -> None:
        with self._lock:
            self._waiters[id_].remove(waiter)
            if not self._waiters[id_]:
                del self._waiters[id_]

    def _run(self) -> None:
        while True:
            with self._lock:
                ids = list(self._waiters)
                if not ids:
                    self._is_running = False
                    return
            began = time.monotonic()
            try:
                with contextlib.closing(connection):
                    facts = self._look(ids)
            except Exception:
                logger.exception("could not look for news; trying again")
                facts = {}
            self._tell(facts)
            time.sleep(max(self._seconds, (time.monotonic() - began) / _LARGEST_SHARE))

    def _tell(self, facts: Mapping[UUID, FactT]) -> None:
        with self._lock:
            waiting = [(waiter, facts[id_]) for id_, waiters in self._waiters.items() if id_ in facts for waiter in waiters]
        for waiter, fact in waiting:
            if waiter.is_news(fact):
                with contextlib.suppress(RuntimeError):  # its loop was closed
                    waiter.loop.call_soon_threadsafe(_resolve, waiter.future, fact)


def other_than(known: object) -> Callable[[object], bool]:
    """News is whatever differs from what is known."""
    return lambda fact: fact != known


def _resolve(future: asyncio.Future[FactT], fact: FactT) -> None:
    if not future.done():
        future.set_result(fact)
