"""From the event loop to Postgres and back, in short units that return their connection before anything waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import structlog
from django.db import InterfaceError, OperationalError, connection

from rollouts.engine.errors import StoreFailed

logger = structlog.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_THREADS = 8
_RETRY_SECONDS = 0.5


class Database:
    """Runs services in a few threads of its own."""

    def __init__(self, *, patience: float, threads: int = _THREADS) -> None:
        """`patience`: seconds for which `insist` goes on while the database does not answer."""
        self._patience = patience
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="database")

    async def call(self, service: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a service in a thread and give its connection back to the pool."""

        def unit_of_work() -> R:
            try:
                return service(*args, **kwargs)
            finally:
                connection.close()

        return await asyncio.get_running_loop().run_in_executor(self._threads, unit_of_work)

    async def insist(self, service: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for what must not get lost: outlasts a restart of the database, and a full blob storage for as long.

        Only for guarded writes: the first try may have been committed though its answer never came, and then the second one
        finds its guard false and changes nothing. Raises `StoreFailed` when its patience is over.
        """
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return await self.call(service, *args, **kwargs)
            except (OperationalError, InterfaceError, StoreFailed) as error:
                if time.monotonic() > deadline:
                    raise StoreFailed(str(error)) from error
                logger.warning("store does not answer; trying again", service=service.__name__, error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
