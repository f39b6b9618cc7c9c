"""Writes of many rollouts in one statement: what the rollouts of a process ask for at about the same time is done together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

import structlog

from rollouts.engine.errors import StoreFailed

from .database import Database

logger = structlog.get_logger(__name__)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# Between the starts of two batches of one service. A write that comes alone is not delayed; under load a batch gathers what a
# dozen model calls and tools finish in this time, and the database sees a tenth of the statements.
_PAUSE_SECONDS = 0.02
_LARGEST = 256


class Batch(Generic[Item, Answer]):
    """Calls `service` with lists of items and gives every caller the answer to its own."""

    def __init__(self, database: Database, service: Callable[[Sequence[Item]], Sequence[Answer]]) -> None:
        """`service` writes guarded and in one transaction, so that it may be repeated when its answer was lost."""
        self._database = database
        self._service = service
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._last = 0.0

    async def __call__(self, item: Item) -> Answer:
        """Have one item written, and wait until it is. A caller that is cancelled does not take its item back."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, answer))
        if self._flusher is None:
            self._flusher = loop.create_task(self._flush(), context=Context())  # it works for others than this rollout too
        return await answer

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(max(0.0, self._last + _PAUSE_SECONDS - loop.time()))
            self._last = loop.time()
            batch, self._waiting = self._waiting[:_LARGEST], self._waiting[_LARGEST:]
            await self._write(batch)
        self._flusher = None

    async def _write(self, batch: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._database.insist(self._service, [item for item, _ in batch])
        except Exception as error:
            if len(batch) == 1 or isinstance(error, StoreFailed):
                for _, waiting in batch:
                    if not waiting.done():
                        waiting.set_exception(error)
                return
            # One item that the database refuses must not take the others with it.
            logger.warning("batch refused; writing one by one", items=len(batch), error=str(error))
            for one in batch:
                await self._write([one])
            return
        for (_, waiting), answer in zip(batch, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)
