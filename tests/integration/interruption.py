"""Cancels a program at one of its await points, so that a test can go through all of them."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Coroutine, Generator
from typing import Any


class Interruption:
    """Cancels what `run` runs when it, or a task begun by it, comes to its n-th await point: counted over all of them."""

    def __init__(self, at: int) -> None:
        self.happened = False
        self._left = at
        self._task: asyncio.Task[object] | None = None

    async def run(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Returns when the coroutine has ended, however; tasks it leaves behind go on without being counted."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, inner, **options: asyncio.Task(self._stepped(inner), loop=loop, **options))
        self._task = loop.create_task(coroutine)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        finally:
            loop.set_task_factory(None)
            self._task = None

    async def _stepped(self, coroutine: Any) -> Any:
        return await self._steps(coroutine)

    @types.coroutine
    def _steps(self, coroutine: Any) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        while True:
            try:
                waits_for = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if self._left == 0 and self._task is not None:
                self.happened = True
                # Not at once: the task has to be waiting, as it is when somebody else cancels it.
                self._task.get_loop().call_soon(self._task.cancel)
            try:
                yield waits_for
                thrown = None
            except BaseException as error:
                thrown = error
