"""One agent's calls: each is sampled as exact ids, goes on from the earlier reply it belongs to, and is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from rollouts.engine.records import Recorder
from rollouts.gateway.allowance import Allowance
from rollouts.gateway.branches import Branches
from rollouts.gateway.errors import CallRefused, Kind, Overflow, SessionClosed, SessionMoved, refusal_of
from rollouts.gateway.ledger import Ledger
from rollouts.gateway.planning import Plan, Planner
from rollouts.gateway.remembered import RememberedConversations
from rollouts.gateway.replies import Event, Finished, Reply, Told
from rollouts.gateway.requests import ModelRequest
from rollouts.gateway.sampling import CallSampler
from rollouts.lifecycle import Fidelity
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.route import Route
from rollouts.llm.sampler import Sampled
from rollouts.llm.types import ModelCallRecord, Sampling

logger = structlog.get_logger(__name__)

Result = TypeVar("Result")

_ENDED = "the session has ended"


class AgentSession:
    """The memory of one agent. Calls may come at the same time; they are recorded in the order in which they end."""

    def __init__(
        self,
        client: ModelClient,
        route: Route,
        recorder: Recorder,
        *,
        sampling: Sampling,
        call_timeout: float,
        model: str,
        max_concurrent: int = 64,
        max_calls: int | None = None,
        on_exhausted: Callable[[], None] = lambda: None,
    ) -> None:
        """`sampling` holds where the agent does not say otherwise; `model` is the name that agents see.

        `call_timeout` (seconds) spans all tries of one reply. Not more than `max_calls` replies are stored, and when another
        one is asked for after them, `on_exhausted` is called.
        """
        self.model = model
        self.overflows = 0  # calls refused because their prompt left no room
        self.bytes_under_way = 0  # of requests, for the endpoints
        self.remembered = RememberedConversations()
        self.failure: ModelError | None = None  # of the last call, when it failed for the servers' fault
        self._route = route
        self._sampling = sampling
        self._max_concurrent = max_concurrent
        self._allowance = Allowance(max_calls, on_exhausted)
        self._branches = Branches()
        self._planner = Planner(client, route, self._branches)
        self._sampler = CallSampler(client, route, self._planner, call_timeout=call_timeout)
        self._ledger = Ledger(client, route, recorder, self._branches, self._planner, close=self._close_for)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._writes: set[asyncio.Task[Any]] = set()
        self._closed: SessionClosed | None = None

    def restore(self, calls: Sequence[ModelCallRecord], *, next_message: int) -> None:
        """Go on from stored calls, in order of their turns. `next_message` is the first index that no message has.

        Raises ValueError when they do not fit together.
        """
        self._ledger.restore(calls, next_message=next_message)
        self._allowance.restore(self.calls)

    @property
    def calls(self) -> int:
        """Stored so far."""
        return self._ledger.calls

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return not (self._under_way or self._writes)

    @property
    def fidelity(self) -> Fidelity:
        """The badge so far."""
        return self._branches.segments.fidelity

    async def reply(self, request: ModelRequest) -> Reply:
        """One reply, stored before it is returned. Raises `CallRefused`, `SessionClosed`, and what the recorder raises."""
        task = self._start(self._serve(request, None))
        try:
            return await self._outcome(task)
        finally:
            await _ended(task)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Event, None]:
        """The same in pieces, as they are sampled. What was sampled is stored also when nobody wants more."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        task = self._start(self._serve(request, queue))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            yield Finished(await self._outcome(task))
        finally:
            await _ended(task)

    async def count_tokens(self, request: ModelRequest) -> int:
        """How many ids the prompt of this request would have."""
        task = self._start(self._plan(request, reserve=False))
        try:
            return len((await self._outcome(task)).prompt.ids)
        finally:
            await _ended(task)

    async def close(self, why: SessionClosed | None = None) -> None:
        """End the calls that are under way and take no more. Waits for what is being stored. Idempotent.

        Tool calls whose results never came are stored without, unless another process goes on with the session.
        """
        is_first = self._closed is None
        if is_first or isinstance(why, SessionMoved):  # which says that the same call can be made again
            self._closed = why or SessionClosed(_ENDED)
        for task in self._under_way:
            task.cancel()
        while pending := self._under_way | self._writes:
            await asyncio.wait(pending)
        if is_first and not isinstance(why, SessionMoved):
            await self._ledger.end()

    def _close_for(self, why: SessionClosed) -> None:
        self._closed = self._closed or why

    def _start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A task of its own for each call, so that `close` can end it."""
        try:
            if self._closed is not None:
                raise self._closed
            if len(self._under_way) >= self._max_concurrent:
                message = f"this session has {self._max_concurrent} calls under way, and no more may be"
                raise CallRefused(Kind.TOO_MANY, message, retry_after=1)
        except BaseException:
            work.close()
            raise
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _outcome(self, task: asyncio.Task[Result]) -> Result:
        """What a call came to. What models and contexts cannot do refuses it."""
        try:
            result = await task
        except asyncio.CancelledError:
            if self._closed is not None and task.cancelled():
                raise self._closed from None
            raise
        except ModelError as exc:
            if exc.status != 400:
                self.failure = exc
            logger.warning("a model call of an agent failed", error=str(exc), server=self._route.server.server_id)
            raise refusal_of(exc) from exc
        self.failure = None
        return result

    async def _serve(self, request: ModelRequest, queue: asyncio.Queue[Event | None] | None) -> Reply:
        sampling = request.wishes.applied(self._sampling)
        if request.fewest_tokens > self._route.server.max_model_len:
            raise self._too_long(request.fewest_tokens)  # before a server is held up by it
        async with self._allowance.one() as taken:
            if self._closed is not None:  # while it waited
                raise self._closed
            plan = await self._plan(request)

            async def store(sampled: Sampled, told: Told | None = None) -> Reply:
                taken.is_handed_over = True
                return await self._finished(self._ledger.store(request, self._planner.hand_over(plan), sampling, sampled, told))

            try:
                if queue is None:
                    answer = await self._sampler.whole(request, plan, sampling)
                else:
                    answer = await self._sampler.in_pieces(request, plan, sampling, tell=queue.put_nowait, keep=store)
                reply = await store(*answer)
            except ContextOverflow as exc:
                raise self._too_long(len(plan.prompt.ids)) from exc
            finally:
                self._planner.release(plan)
        if request.remember is not None:
            self.remembered.add(request.id, (*request.remember, answer.told.message()))
        return reply

    async def _plan(self, request: ModelRequest, *, reserve: bool = True) -> Plan:
        try:
            return await self._planner.plan(request, reserve=reserve)
        except ContextOverflow as exc:
            raise self._too_long(self._route.server.max_model_len + 1) from exc  # at least; the server did not say how long

    def _too_long(self, tokens: int) -> CallRefused:
        self.overflows += 1
        overflow = Overflow(tokens, self._route.server.max_model_len)
        return CallRefused(Kind.INVALID, "the prompt leaves no room in the model's context", overflow=overflow)

    async def _finished(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Store it, whoever goes away meanwhile: half stored would be neither lost nor there."""
        task = asyncio.create_task(work)
        self._writes.add(task)
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        # Whoever waits for its exception gets it; after a disconnection nobody does.
        self._allowance.end(stored=not task.cancelled() and task.exception() is None)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Nobody waits for it any more: it must not go on."""
    task.cancel()
    await asyncio.wait({task})
