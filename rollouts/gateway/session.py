"""One agent's calls: each is sampled as exact ids, goes on from the earlier reply it belongs to, and is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rollouts.engine.errors import AttemptSuperseded
from rollouts.engine.records import MessageRecord, Recorder, ToolCallRecord, TurnRecord
from rollouts.gateway.branches import Branches, Key, Point, Prompt, keys_of
from rollouts.gateway.errors import CallRefused, Kind, SessionClosed
from rollouts.gateway.prompts import in_words
from rollouts.gateway.recording import message_records, tool_call_records
from rollouts.gateway.replies import CallDelta, Event, Finished, ReasoningDelta, Reply, TextDelta
from rollouts.gateway.requests import ModelRequest
from rollouts.gateway.texts import read_reply
from rollouts.lifecycle import Fidelity
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.route import Route
from rollouts.llm.sampler import Sampled, sample
from rollouts.llm.types import ChatMessage, ModelCallRecord, Sampling, SegmentCause

Result = TypeVar("Result")


@dataclass
class _Plan:
    """What one call will send. `segment` is the one it goes on in, reserved for it, or None when it begins a new one."""

    offer: Key
    keys: list[Key]
    prompt_ids: list[int]
    context_ids: list[int]
    segment: int | None = None
    not_continued: SegmentCause | None = None  # why it begins a new one although it goes on from an earlier reply
    point: Point | None = None  # the reply that it goes on from
    answered: int = 0  # how many messages lead up to there


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
        lock_sampling: bool = False,
        require_token_ids: bool = False,
        max_concurrent: int = 64,
    ) -> None:
        """`sampling` holds where the agent does not say otherwise, and with `lock_sampling` whatever it says.

        `model` is the name that agents see; `call_timeout` (seconds) spans all tries of one reply. `require_token_ids` makes a
        server that returns no ids an error instead of a badge.
        """
        self.model = model
        self.calls = 0  # stored so far
        self.overflows = 0  # calls refused because their prompt left no room
        self.failure: ModelError | None = None  # of the last call, when it failed for the servers' fault
        self._client = client
        self._route = route
        self._recorder = recorder
        self._sampling = sampling
        self._call_timeout = call_timeout
        self._lock_sampling = lock_sampling
        self._require_token_ids = require_token_ids
        self._max_concurrent = max_concurrent
        self._branches = Branches()
        self._next_turn = self._next_message = 0
        self._recording = asyncio.Lock()
        self._under_way: set[asyncio.Timeout] = set()
        self._writes: set[asyncio.Task[Any]] = set()
        self._closed: SessionClosed | None = None

    @property
    def fidelity(self) -> Fidelity:
        """The badge so far."""
        return self._branches.buffer.fidelity

    async def reply(self, request: ModelRequest) -> Reply:
        """One reply, stored before it is returned. Raises `CallRefused`, `SessionClosed`, and what a recorder raises."""
        with self._counted():
            async with self._ended_by_close():
                plan = await self._plan(request)
                try:
                    sampling = request.wishes.applied(self._sampling, locked=self._lock_sampling)
                    sampled = await self._sample(plan, sampling)
                    return await self._keep(request, plan, sampling, sampled)
                finally:
                    self._release(plan)

    async def stream(self, request: ModelRequest) -> AsyncIterator[Event]:
        """The same in pieces."""
        reply = await self.reply(request)
        if reply.reasoning:
            yield ReasoningDelta(reply.reasoning)
        if reply.content:
            yield TextDelta(reply.content)
        for index, call in enumerate(reply.calls):
            yield CallDelta(index, call)
        yield Finished(reply)

    async def count_tokens(self, request: ModelRequest) -> int:
        """How many ids the prompt of this request would have."""
        async with self._ended_by_close():
            return len((await self._plan(request, reserve=False)).prompt_ids)

    async def close(self, reason: str = "the session has ended") -> None:
        """End the calls that are under way and take no more. Waits for what is being stored. Idempotent."""
        self._closed = self._closed or SessionClosed(reason)
        for scope in self._under_way:
            scope.reschedule(asyncio.get_running_loop().time())
        while self._writes or self._under_way:
            await asyncio.wait(self._writes) if self._writes else await asyncio.sleep(0)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if len(self._under_way) >= self._max_concurrent:
            message = f"this session has {self._max_concurrent} calls under way, and no more may be"
            raise CallRefused(Kind.TOO_MANY, message, retry_after=1)
        yield

    @contextlib.asynccontextmanager
    async def _ended_by_close(self) -> AsyncIterator[None]:
        """`close` ends what happens in here with `SessionClosed`. What models and contexts cannot do refuses the call."""
        if self._closed is not None:
            raise self._closed
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._under_way.add(scope)
                try:
                    yield
                finally:
                    self._under_way.discard(scope)
            self.failure = None
        except TimeoutError:
            if self._closed is None or not scope.expired():
                raise
            raise self._closed from None
        except ContextOverflow as exc:
            self.overflows += 1
            raise CallRefused(Kind.INVALID, str(exc), field="messages", overflow=True) from exc
        except ModelError as exc:
            self.failure = exc
            kind = Kind.NO_SERVER if exc.retryable else Kind.MODEL_FAILED
            raise CallRefused(kind, str(exc), retry_after=1 if exc.retryable else None) from exc

    async def _plan(self, request: ModelRequest, *, reserve: bool = True) -> _Plan:
        """Find what the request goes on from, and the ids to send. With `reserve` the segment it goes on in is its own."""
        offer = _offer_key(request)
        keys = keys_of(request.messages)
        if same := self._branches.same_prompt(offer, keys):
            ids = self._branches.ids(same)
            return _Plan(offer, keys, ids, ids)
        found = self._branches.latest_point(offer, keys)
        if found is None:
            ids = await self._render(request)
            return _Plan(offer, keys, ids, ids)
        point, answered = found
        plan = _Plan(offer, keys, [], [], point=point, answered=answered)
        if reserve and self._branches.reserve(point):
            plan.segment = point.segment
        try:
            context = await self._continuation(request, point, answered)
            if context is not None:
                plan.prompt_ids = self._branches.ids(point) + context
            else:
                plan.prompt_ids = await self._render(request)
        except BaseException:
            self._release(plan)
            raise
        if context is None:
            self._release(plan)
            plan.not_continued = _why_not_continued(point)
        plan.context_ids = plan.prompt_ids if plan.segment is None else context or []
        return plan

    def _release(self, plan: _Plan) -> None:
        if plan.segment is not None:
            self._branches.release(plan.segment)
            plan.segment = None

    async def _render(self, request: ModelRequest) -> list[int]:
        server, tools = self._route.server, await self._native_tools(request)
        messages = request.messages if tools else in_words(request.messages, request.tools)
        return await self._client.render(server, messages, add_generation_prompt=True, tools=tools)

    async def _continuation(self, request: ModelRequest, point: Point, answered: int) -> list[int] | None:
        if point.last_id is None:
            return None
        tools = await self._native_tools(request)
        reply: ChatMessage = {"role": "assistant", "content": point.reasoned}
        new = request.messages[answered:]
        if tools:
            reply["tool_calls"] = request.messages[answered - 1].get("tool_calls", [])
        else:
            new = tuple(in_words(new, ()))
        return await self._client.turns.continuation(self._route.server, point.last_id, [reply], new, tools=tools)

    async def _native_tools(self, request: ModelRequest) -> list[dict[str, Any]] | None:
        """The tools for the template, when it has a place for them. Otherwise they are described in words."""
        if not request.tools:
            return None
        tools = [tool.described() for tool in request.tools]
        return tools if await self._client.turns.shows_tools(self._route.server, tools) else None

    def _why_new(self, request: ModelRequest, plan: _Plan) -> tuple[SegmentCause, int | None]:
        """Why a segment begins, and which one it branches off. Asked when it does: other calls may have ended meanwhile."""
        if same := self._branches.same_prompt(plan.offer, plan.keys):
            return SegmentCause.SIBLING, same.segment
        if plan.point is not None:
            return plan.not_continued or SegmentCause.SIBLING, plan.point.segment
        if not self._branches.buffer.segments:
            return SegmentCause.START, None
        until_user = next((n for n, m in enumerate(request.messages, 1) if m["role"] == "user"), len(request.messages))
        segment, shared = self._branches.shared(plan.keys)
        return (SegmentCause.EDITED, segment) if shared >= until_user else (SegmentCause.SUBAGENT, None)

    async def _sample(self, plan: _Plan, sampling: Sampling) -> Sampled:
        sampled = await sample(self._client, self._route, plan.prompt_ids, sampling, timeout=self._call_timeout)
        if not sampled.completion.token_ids and self._require_token_ids:
            raise ModelError(f"{sampled.server.url} returns no token ids, and they are required", retryable=False)
        return sampled

    async def _keep(self, request: ModelRequest, plan: _Plan, sampling: Sampling, sampled: Sampled) -> Reply:
        """Store, whoever goes away meanwhile: half stored would be neither lost nor there."""
        return await self._finished(self._store(request, plan, sampling, sampled))

    async def _finished(self, work: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.create_task(work)
        self._writes.add(task)
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it; after a disconnection nobody does

    async def _store(self, request: ModelRequest, plan: _Plan, sampling: Sampling, sampled: Sampled) -> Reply:
        completion, server, spans = sampled
        async with self._recording:
            if self._closed is not None:
                raise self._closed
            turn, self._next_turn = self._next_turn, self._next_turn + 1
            cause, parent = self._why_new(request, plan) if plan.segment is None else ("", None)
            record = ModelCallRecord(
                turn=turn,
                segment=len(self._branches.buffer.segments) if plan.segment is None else plan.segment,
                context_ids=plan.context_ids,
                sampled_ids=completion.token_ids,
                logprobs=completion.logprobs,
                text=completion.text,
                finish_reason=completion.finish_reason,
                prompt_tokens=len(plan.prompt_ids),
                policy=server.policy,
                policy_version=spans[0].version if spans else server.policy_version,
                server_id=server.server_id,
                latency=completion.latency,
                sampling=asdict(sampling) | {"stop": list(sampling.stop)},
                policy_version_last=spans[-1].version if spans else None,
                version_spans=spans if len(spans) > 1 else (),
                opened_by=cause,
                parent_segment=parent,
                dialect=request.dialect,
            )
            await self._record(request, plan, record)
            return self._grow(request, plan, record)

    async def _record(self, request: ModelRequest, plan: _Plan, call: ModelCallRecord) -> None:
        _, known = self._branches.shared(plan.keys)
        asked_in = plan.point.turn if plan.point else None
        first = self._next_message
        messages = message_records(request.messages[known:], first_index=first, turn=call.turn, asked_in=asked_in)
        messages.append(MessageRecord(first + len(messages), call.turn, "assistant", call.text))
        results: list[ToolCallRecord] = []
        if plan.point is not None:
            brought = request.messages[max(known, plan.answered) :]
            results = tool_call_records(plan.point, request.messages[plan.answered - 1], brought)
        try:
            await self._recorder.turn(TurnRecord(call.turn, messages, call, results))
        except AttemptSuperseded as exc:
            self._closed = self._closed or SessionClosed("the session has been ended or taken over")
            raise self._closed from exc
        except Exception:
            # Whether it is stored is not known, so nothing may follow it.
            self._closed = self._closed or SessionClosed("a call of this session could not be stored")
            raise
        self._next_message += len(messages)

    def _grow(self, request: ModelRequest, plan: _Plan, record: ModelCallRecord) -> Reply:
        """Take a stored call into the tree."""
        self._branches.buffer.add(record)
        self._branches.add_prompt(plan.offer, plan.keys, Prompt(record.segment, record.prompt_tokens))
        self.calls += 1
        reply = read_reply(record, request)
        reasoned = record.text if reply.reasoning else plan.point.reasoned if plan.point else ""
        point = Point(
            segment=record.segment,
            length=record.prompt_tokens + len(record.sampled_ids),
            last_id=record.sampled_ids[-1] if record.sampled_ids else None,
            was_cut=record.finish_reason == "length" or record.text.endswith(tuple(record.sampling["stop"])),
            reasoned=reasoned,
            turn=record.turn,
            at=time.time(),
        )
        self._branches.add_point(plan.offer, keys_of([reply.message()], plan.keys[-1])[-1], point)
        return reply


def _offer_key(request: ModelRequest) -> Key:
    if not request.tools:
        return ""
    return keys_of([{"role": "system", "content": json.dumps([tool.described() for tool in request.tools], sort_keys=True)}])[0]


def _why_not_continued(point: Point) -> SegmentCause:
    if point.last_id is None:
        return SegmentCause.NO_IDS
    return SegmentCause.CUT if point.was_cut else SegmentCause.TEMPLATE
