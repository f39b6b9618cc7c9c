"""One agent's calls: each is sampled as exact ids, goes on from the earlier reply it belongs to, and is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from rollouts.engine.errors import AttemptSuperseded
from rollouts.engine.records import MessageRecord, Recorder, ToolCallRecord, TurnRecord
from rollouts.gateway.branches import Branches, Point, Prompt, keys_of
from rollouts.gateway.errors import CallRefused, Kind, Overflow, SessionClosed, SessionMoved
from rollouts.gateway.passing import chat_body, read_chat
from rollouts.gateway.planning import Plan, Planner
from rollouts.gateway.recording import message_records, tool_call_records, unanswered_record
from rollouts.gateway.remembered import RememberedConversations
from rollouts.gateway.replies import Event, Finished, Reply, Told
from rollouts.gateway.requests import ModelRequest
from rollouts.gateway.texts import Telling, take_apart
from rollouts.lifecycle import Fidelity
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.messages import pictures_in
from rollouts.llm.replies import REASONING_START
from rollouts.llm.reply import merged
from rollouts.llm.route import Route
from rollouts.llm.sampler import Sampled, ask, sample
from rollouts.llm.turns import REASONING_END
from rollouts.llm.types import Completion, ModelCallRecord, Piece, Sampling, ServerAddress, VersionSpan

Result = TypeVar("Result")

_ENDED = "the session has ended"
_TAG_IDS = 16  # more than a tag of reasoning has


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
    ) -> None:
        """`sampling` holds where the agent does not say otherwise; `model` is the name that agents see.

        `call_timeout` (seconds) spans all tries of one reply.
        """
        self.model = model
        self.calls = 0  # stored so far
        self.overflows = 0  # calls refused because their prompt left no room
        self.bytes_under_way = 0  # of requests, for the endpoints
        self.remembered = RememberedConversations()
        self.failure: ModelError | None = None  # of the last call, when it failed for the servers' fault
        self._client = client
        self._route = route
        self._recorder = recorder
        self._sampling = sampling
        self._call_timeout = call_timeout
        self._max_concurrent = max_concurrent
        self._branches = Branches()
        self._planner = Planner(client, route, self._branches)
        self._next_turn = self._next_message = 0
        self._recording = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._writes: set[asyncio.Task[Any]] = set()
        self._closed: SessionClosed | None = None
        self._thinking: bool | None = None
        self._unanswered: dict[tuple[int, int], ToolCallRecord] = {}  # by turn and index

    def restore(self, calls: Sequence[ModelCallRecord], *, next_message: int) -> None:
        """Go on from stored calls, in order of their turns. `next_message` is the first index that no message has.

        Raises ValueError when they do not fit together.
        """
        reasoned: dict[int | None, str] = {}
        for call in calls:
            before = reasoned.get(call.segment) or reasoned.get(call.parent_segment, "")
            reasoned[call.segment] = call.text if REASONING_END in call.text else before
            self._grow(call, before)
            self._next_turn = call.turn + 1
        self._next_message = next_message

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
        task = self._start(self._planner.plan(request, reserve=False))
        try:
            return len((await self._outcome(task)).prompt.ids)
        finally:
            await _ended(task)

    async def close(self, why: SessionClosed | None = None) -> None:
        """End the calls that are under way and take no more. Waits for what is being stored. Idempotent.

        Tool calls whose results never came are stored without, unless another process goes on with the session.
        """
        is_first, self._closed = self._closed is None, self._closed or why or SessionClosed(_ENDED)
        for task in self._under_way:
            task.cancel()
        while pending := self._under_way | self._writes:
            await asyncio.wait(pending)
        if is_first and self._unanswered and not isinstance(why, SessionMoved):
            with contextlib.suppress(Exception):  # those who ended it may have stored its end already
                await self._recorder.turn(TurnRecord(self._next_turn, tool_calls=list(self._unanswered.values())))

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
            if exc.status == 400:
                raise CallRefused(Kind.INVALID, str(exc), field="messages") from exc
            self.failure = exc
            kind = Kind.NO_SERVER if exc.retryable else Kind.MODEL_FAILED
            raise CallRefused(kind, str(exc), retry_after=1 if exc.retryable else None) from exc
        self.failure = None
        return result

    async def _serve(self, request: ModelRequest, queue: asyncio.Queue[Event | None] | None) -> Reply:
        sampling = request.wishes.applied(self._sampling)
        if request.fewest_tokens > self._route.server.max_model_len:
            raise self._too_long(request.fewest_tokens)  # before a server is held up by it
        plan = await self._planner.plan(request)
        try:
            if plan.is_text:
                sampled, told = await self._pass_on(request, sampling, queue)
            elif queue is None:
                sampled = await self._sample(request, plan, sampling)
                # Reasoning that has ended shows by itself whether the prompt began it.
                thinking = sampled.completion.finish_reason == "length" and await self._opens_reasoning(request, plan)
                tool_format = self._planner.tool_format(plan)
                told = take_apart(sampled.completion.text, request, sampling.stop, tool_format, thinking=thinking)
            else:
                sampled, told = await self._sample_in_pieces(request, plan, sampling, queue)
            reply = await self._finished(self._store(request, self._planner.hand_over(plan), sampling, sampled, told))
        except ContextOverflow as exc:
            raise self._too_long(len(plan.prompt.ids)) from exc
        finally:
            self._planner.release(plan)
        if request.remember is not None:
            self.remembered.add(request.id, (*request.remember, told.message()))
        return reply

    def _too_long(self, tokens: int) -> CallRefused:
        self.overflows += 1
        overflow = Overflow(tokens, self._route.server.max_model_len)
        return CallRefused(Kind.INVALID, "the prompt leaves no room in the model's context", overflow=overflow)

    async def _pass_on(
        self, request: ModelRequest, sampling: Sampling, queue: asyncio.Queue[Event | None] | None
    ) -> tuple[Sampled, Told]:
        started = time.monotonic()
        async with self._route.call() as server:
            answer = await self._client.chat(server, chat_body(request, sampling), timeout=self._call_timeout)
            completion, told = read_chat(answer, request, time.monotonic() - started)
        if queue is not None:
            for event in told.events():
                queue.put_nowait(event)
        return Sampled(completion, server, ()), told

    async def _sample(self, request: ModelRequest, plan: Plan, sampling: Sampling, **streaming: Any) -> Sampled:
        return await sample(
            self._client,
            self._route,
            plan.prompt,
            sampling,
            timeout=self._call_timeout,
            pictures=pictures_in(request.messages),
            **streaming,
        )

    async def _sample_in_pieces(
        self, request: ModelRequest, plan: Plan, sampling: Sampling, queue: asyncio.Queue[Event | None]
    ) -> tuple[Sampled, Told]:
        thinking = await self._opens_reasoning(request, plan)
        telling = Telling(request, sampling.stop, self._planner.tool_format(plan), thinking=thinking)
        given: list[tuple[Piece, ServerAddress]] = []

        async def emit(piece: Piece, server: ServerAddress) -> None:
            given.append((piece, server))
            for event in telling.add(piece.text):
                queue.put_nowait(event)

        started = time.monotonic()
        try:
            sampled = await self._sample(request, plan, sampling, emit=emit)
        except asyncio.CancelledError:
            if cut := self._cut_off(given, time.monotonic() - started):
                await self._finished(self._store(request, self._planner.hand_over(plan), sampling, cut, None))
            raise
        told, rest = telling.end(sampled.completion.text)
        for event in rest:
            queue.put_nowait(event)
        return sampled, told

    async def _opens_reasoning(self, request: ModelRequest, plan: Plan) -> bool:
        """Whether the prompts of this model end within a tag of reasoning. Found out once, from the end of a prompt."""
        if request.prompt is not None:
            return False
        if self._thinking is None:
            try:
                ids = plan.prompt.ids[-_TAG_IDS:]
                end = await ask(self._route, lambda server: self._client.detokenize(server, ids))
            except ModelError as exc:
                if exc.retryable:
                    raise
                end = ""  # a server that does not tell
            self._thinking = end.rstrip().endswith(REASONING_START)
        return self._thinking

    def _cut_off(self, given: Sequence[tuple[Piece, ServerAddress]], latency: float) -> Sampled | None:
        """What was sampled until the agent wanted no more of it; None where nothing was, or nobody knows by which weights."""
        ids = [token for piece, _ in given for token in piece.token_ids]
        if not ids:
            return None
        server, now = given[-1][1], self._route.server
        if now.server_id == server.server_id and now.policy_version != server.policy_version:
            return None  # they were changed under it, and where, the server would have said at its end
        logprobs = [value for piece, _ in given for value in piece.logprobs or ()]
        text = "".join(piece.text for piece, _ in given)
        completion = Completion(text, ids, logprobs if len(logprobs) == len(ids) else None, "abort", latency)
        return Sampled(completion, server, merged(VersionSpan(s.policy_version, len(p.token_ids)) for p, s in given))

    async def _finished(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do it, whoever goes away meanwhile: half stored would be neither lost nor there."""
        task = asyncio.create_task(work)
        self._writes.add(task)
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it; after a disconnection nobody does

    async def _store(self, request: ModelRequest, plan: Plan, sampling: Sampling, sampled: Sampled, told: Told | None) -> Reply:
        """Record a call and take it into the tree. Nothing can go on from one of which nothing was `told`."""
        try:
            async with self._recording:
                record = self._record_of(request, plan, sampling, sampled, told)
                await self._record(request, plan, record)
                self._branches.saw(plan.keys, record.segment)
                self._grow(record, plan.point.reasoned if plan.point else "")
                for index, call in enumerate(told.calls if told else ()):
                    self._unanswered[record.turn, index] = unanswered_record(record.turn, index, call)
        finally:
            self._planner.release(plan)
        return Reply(told or Told(), record)

    def _record_of(
        self, request: ModelRequest, plan: Plan, sampling: Sampling, sampled: Sampled, told: Told | None
    ) -> ModelCallRecord:
        reply_key = keys_of([told.message()], plan.keys[-1])[-1] if told and request.prompt is None else ""
        segment, cause, parent = plan.segment, "", None
        if segment is None:
            segment = len(self._branches.segments)
            cause, parent = self._planner.why_new(request, plan)
        return sampled.record(
            turn=self._next_turn,
            segment=segment,
            context=plan.context,
            prompt_tokens=len(plan.prompt.ids),
            sampling=sampling,
            opened_by=cause,
            parent_segment=parent,
            dialect=request.dialect,
            conversation_key=" ".join((plan.offer, plan.keys[-1], reply_key)),
        )

    async def _record(self, request: ModelRequest, plan: Plan, call: ModelCallRecord) -> None:
        """Store a call with the messages that nobody has stored yet, and the results that they bring."""
        _, known = self._branches.shared(plan.keys)
        asked_in = plan.point.turn if plan.point else None
        first = self._next_message
        messages = message_records(request.messages[known:], first_index=first, turn=call.turn, asked_in=asked_in)
        if request.prompt is not None:
            text = await self._client.detokenize(self._route.server, call.context_ids)
            messages = [MessageRecord(first, call.turn, "user", text)]
        messages.append(MessageRecord(first + len(messages), call.turn, "assistant", call.text))
        results: list[ToolCallRecord] = []
        if plan.point is not None:
            brought = request.messages[max(known, plan.answered) :]
            results = tool_call_records(plan.point, request.messages[plan.answered - 1], brought)
        await self._write(TurnRecord(call.turn, messages, call, results))
        self._next_turn += 1
        self._next_message = first + len(messages)
        for result in results:
            self._unanswered.pop((result.turn, result.index), None)

    async def _write(self, record: TurnRecord) -> None:
        try:
            await self._recorder.turn(record)
        except AttemptSuperseded as exc:
            self._closed = self._closed or SessionClosed("the session has been ended or taken over")
            raise self._closed from exc
        except Exception:
            # Whether it is stored is not known, so nothing may follow it.
            self._closed = self._closed or SessionClosed("a call of this session could not be stored")
            raise

    def _grow(self, call: ModelCallRecord, reasoned: str) -> None:
        """Take a stored call into the tree. `reasoned` is a reply before it that contains reasoning."""
        offer, prompt_key, reply_key = call.conversation_key.split(" ")
        self._branches.segments.add(call)
        self._branches.add_prompt(offer, prompt_key, Prompt(call.segment, call.prompt_tokens))
        self.calls += 1
        if not reply_key:
            return
        point = Point(
            segment=call.segment,
            length=call.prompt_tokens + len(call.sampled_ids),
            last_id=call.sampled_ids[-1] if call.sampled_ids else None,
            was_cut=call.finish_reason == "length" or call.text.endswith(tuple(call.sampling["stop"])),
            reasoned=call.text if REASONING_END in call.text else reasoned,
            turn=call.turn,
            at=time.time(),
        )
        self._branches.add_point(offer, reply_key, point)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Nobody waits for it any more: it must not go on."""
    task.cancel()
    await asyncio.wait({task})
