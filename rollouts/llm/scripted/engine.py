"""The scripted server's scheduler: who is sampled, who waits, what a pause does to them, and which weights are loaded.

As with vLLM, a pause holds back what is new, and lets what runs end (`wait`), ends it (`abort`) or freezes it (`keep`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Literal

from rollouts.llm.scripted.cache import BlockCache, PictureCache
from rollouts.llm.scripted.sequences import Request

PauseMode = Literal["abort", "wait", "keep"]


class Engine:
    """Samples requests, at most `max_running` at once.

    `weights` is what logprobs depend on: the path they were loaded from, empty for those of the start. `label` is what the
    server calls them. `token_delay` is in seconds.
    """

    def __init__(self, *, max_running: int, token_delay: float, cache: BlockCache) -> None:
        self.weights = ""
        self.label = "default"
        self.adapters: dict[str, str] = {}
        self.token_delay = token_delay
        self.cache = cache
        self.pictures = PictureCache()
        self.paused: PauseMode | None = None
        self.asleep = False
        self._max_running = max_running
        self._running: set[Request] = set()
        self._waiting: deque[Request] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def held_tokens(self) -> int:
        """What the running requests keep in the cache, in tokens."""
        return sum(len(request.prompt_ids) + request.sampled_count for request in self._running)

    @contextlib.asynccontextmanager
    async def slot(self, request: Request) -> AsyncIterator[None]:
        """Wait until it is its turn to be sampled."""
        try:
            await self._admit(request)
            yield
        finally:
            self._running.discard(request)
            if request in self._waiting:
                self._waiting.remove(request)
            self._let_in()

    async def sample(self, request: Request, delay: float, *, step_by_step: bool) -> AsyncIterator[None]:
        """Sample a request that has a slot, to its end; yields after every token when `step_by_step`, and at the end.

        `delay` is how long the first token takes, in seconds.
        """
        self.cache.look_up(request.seen)
        await request.let_pass(delay)
        everything = not (step_by_step or self.token_delay)
        while not request.ended:
            if request.aborted:
                request.abort()
            elif self.paused == "keep":
                await request.rest(None)
                continue
            else:
                request.step(self.weights_of(request.model), self.label, everything=everything)
            if step_by_step or request.ended:
                yield
            if self.token_delay and not request.ended:
                await request.let_pass(self.token_delay)
        self.cache.store(request.seen_and_sampled())

    async def pause(self, mode: PauseMode) -> None:
        """Returns once the mode's promise holds: nothing is sampled any more."""
        self.paused = mode
        self._wake_running()
        if mode == "abort":
            self.abort_all()
        if mode != "keep":
            await self._idle.wait()
        self.pictures.clear()

    def resume(self) -> None:
        self.paused = None
        self._wake_running()
        self._let_in()

    def abort_all(self) -> int:
        """End every request with what it has; how many there were."""
        requests = [*self._running, *self._waiting]
        for request in requests:
            request.aborted = True
            request.wake()
        return len(requests)

    def forget(self, *, also_running: bool) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests that are sampled hold blocks of it."""
        if self._running and self.paused is None and not also_running:
            return False
        self.cache.clear()
        return True

    def weights_of(self, model: str) -> str:
        """What its logprobs depend on: the base's, and the adapter's if it is one."""
        adapter = self.adapters.get(model)
        return self.weights if adapter is None else f"{self.weights}+{adapter}"

    def load(self, weights: str) -> None:
        """Sample with these from now on."""
        self.weights = weights
        self.pictures.forget_computed()

    def _wake_running(self) -> None:
        for request in self._running:
            request.wake()

    async def _admit(self, request: Request) -> None:
        self._waiting.append(request)
        self._let_in()
        while request not in self._running and not request.aborted:
            await request.rest(None)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        self._running.add(request)
        self._idle.clear()
        request.wake()

    def _let_in(self) -> None:
        if not self._running:
            self._idle.set()
        while self._waiting and self.paused is None and len(self._running) < self._max_running:
            self._enter(self._waiting[0])
