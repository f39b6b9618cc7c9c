"""What is stored of a session, and taken into its tree once it is: calls in the order in which they end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from rollouts.engine.errors import AttemptSuperseded
from rollouts.engine.records import MessageRecord, Recorder, ToolCallRecord, TurnRecord
from rollouts.gateway.branches import Branches, Point, Prompt, keys_of
from rollouts.gateway.errors import SessionClosed
from rollouts.gateway.planning import Plan, Planner
from rollouts.gateway.recording import message_records, tool_call_records, unanswered_record
from rollouts.gateway.replies import Reply, Told
from rollouts.gateway.requests import ModelRequest
from rollouts.llm.client import ModelClient
from rollouts.llm.route import Route
from rollouts.llm.sampler import Sampled
from rollouts.llm.turns import REASONING_END
from rollouts.llm.types import ModelCallRecord, Sampling


class Ledger:
    """The records of one session. `close` is called with the reason once nothing may be stored any more."""

    def __init__(
        self,
        client: ModelClient,
        route: Route,
        recorder: Recorder,
        branches: Branches,
        planner: Planner,
        *,
        close: Callable[[SessionClosed], None],
    ) -> None:
        self.calls = 0  # stored so far
        self._client = client
        self._route = route
        self._recorder = recorder
        self._branches = branches
        self._planner = planner
        self._close = close
        self._next_turn = self._next_message = 0
        self._recording = asyncio.Lock()
        self._failure: Exception | None = None  # of a call that may or may not be stored
        self._unanswered: dict[tuple[int, int], ToolCallRecord] = {}  # by turn and index

    def restore(self, calls: Sequence[ModelCallRecord], *, next_message: int) -> None:
        """As `AgentSession.restore`."""
        reasoned: dict[int | None, str] = {}
        for call in calls:
            before = reasoned.get(call.segment) or reasoned.get(call.parent_segment, "")
            reasoned[call.segment] = call.text if REASONING_END in call.text else before
            self._grow(call, before)
            self._next_turn = call.turn + 1
        self._next_message = next_message

    async def store(self, request: ModelRequest, plan: Plan, sampling: Sampling, sampled: Sampled, told: Told | None) -> Reply:
        """Record a call and take it into the tree. Nothing can go on from one of which nothing was `told`."""
        try:
            async with self._recording:
                if self._failure is not None:  # this call would get the same turn
                    raise self._failure
                record = self._record_of(request, plan, sampling, sampled, told)
                await self._record(request, plan, record)
                self._branches.saw(plan.keys, record.segment)
                self._grow(record, plan.point.reasoned if plan.point else "")
                for index, call in enumerate(told.calls if told else ()):
                    self._unanswered[record.turn, index] = unanswered_record(record.turn, index, call)
        finally:
            self._planner.release(plan)
        return Reply(told or Told(), record)

    async def end(self) -> None:
        """Store the tool calls whose results never came without these."""
        if self._unanswered and self._failure is None:
            with contextlib.suppress(Exception):  # those who ended the session may have stored its end already
                await self._recorder.turn(TurnRecord(self._next_turn, tool_calls=list(self._unanswered.values())))

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
            self._failure = SessionClosed("the session has been ended or taken over")
            self._close(self._failure)
            raise self._failure from exc
        except Exception as exc:
            self._failure = exc
            self._close(exc if isinstance(exc, SessionClosed) else SessionClosed("a call of this session could not be stored"))
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
