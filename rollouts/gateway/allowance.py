"""How many replies a session may have, however many are asked for at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from rollouts.gateway.errors import SessionClosed


@dataclass
class Taken:
    """One reply that may be sampled."""

    is_handed_over: bool = False  # to whoever calls `Allowance.end`


class Allowance:
    """`most` replies, or any number. `on_exhausted` is called when one more is asked for after all of them were stored."""

    def __init__(self, most: int | None, on_exhausted: Callable[[], None]) -> None:
        self._most = most
        self._on_exhausted = on_exhausted
        self._begun = self._stored = 0
        self._changed = asyncio.Event()

    def restore(self, stored: int) -> None:
        """So many were stored before."""
        self._begun = self._stored = stored

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Taken]:
        """One of them, which comes to nothing unless it is handed over. Waits while it depends on others whether there is one.

        Raises `SessionClosed` when there will be none.
        """
        await self._begin()
        taken = Taken()
        try:
            yield taken
        finally:
            if not taken.is_handed_over:
                self.end(stored=False)

    def end(self, *, stored: bool) -> None:
        """What came of one that was handed over."""
        if stored:
            self._stored += 1
        else:
            self._begun -= 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _begin(self) -> None:
        while self._most is not None and self._begun >= self._most:
            if self._stored >= self._most:
                self._on_exhausted()
                raise SessionClosed(f"all of the {self._most} model calls were made")
            await self._changed.wait()
        self._begun += 1
