"""The shipped agent loop: sample a reply, run the tools it calls, show it the results, until it calls none."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from pydantic import ValidationError

from rollouts.engine.budget import Budget
from rollouts.engine.errors import AttemptSuperseded, EnvironmentFailed, StoreFailed, describe
from rollouts.engine.records import Recorder, TurnRecord
from rollouts.engine.tools import PictureChooser, Tool, ToolResult, none_shown, render_result, signature
from rollouts.engine.turn import TurnDraft
from rollouts.lifecycle import Cause, Phase, Termination
from rollouts.llm.conversation import Conversation
from rollouts.llm.errors import ContextOverflow
from rollouts.llm.pictures import picture_message
from rollouts.llm.toolcalls import ParsedReply, parse_reply
from rollouts.llm.types import ChatMessage, ToolCallRequest
from sandboxes.protocol import Picture

logger = structlog.get_logger(__name__)

# A rollout that is cut short may still store its last turn, but a worker that drains must not wait long for it.
_LAST_WRITE_SECONDS = 0.5
# A tool keeps its own time limit; one that is this much over it is broken.
_TOOL_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class AgentSettings:
    """Bounds on one rollout's loop."""

    max_turns: int = 10
    tool_timeout: float = 120.0  # seconds, for one call; the run's `timeouts.action` holds too
    max_malformed: int = 3  # turns in a row of which no call could be carried out
    tool_result_role: Literal["tool", "user"] = "tool"  # some chat templates know no "tool"
    max_result_chars: int = 8000  # of a tool's output as shown to the model
    max_result_pictures: int = 4  # of a tool, as shown to a model that sees


class Agent:
    """One rollout's loop. Use once."""

    def __init__(
        self,
        conversation: Conversation,
        tools: Sequence[Tool],
        settings: AgentSettings,
        recorder: Recorder,
        budget: Budget | None = None,
    ) -> None:
        """Without a `budget` (of the run) only `settings` bound the loop."""
        self._conversation = conversation
        self._tools = {tool.name: tool for tool in tools}
        self._signatures = {tool.name: signature(tool) for tool in tools}
        self._settings = settings
        self._recorder = recorder
        self._budget = budget
        self._pictures = PictureChooser(settings.max_result_pictures)
        self._malformed_in_a_row = 0
        self.final_text = ""  # the last reply so far, without its tool calls and reasoning

    async def run(self, messages: Sequence[ChatMessage]) -> Termination:
        """Carry out the rollout from these messages and return how the policy ended it.

        Every turn is recorded once, also one that is cut short. Raises `ModelError`, `SandboxError`, `StoreFailed`,
        `AttemptSuperseded`, `EnvironmentFailed`, and what a tool of the environment raises.
        """
        self._conversation.append(*messages)
        recorded = 0
        for turn in range(self._settings.max_turns):
            if self._budget is not None:
                self._budget.turns_left = self._settings.max_turns - turn - 1
            draft = TurnDraft(turn, first_message=recorded)
            if turn == 0:
                for message in messages:
                    draft.add_message(message)
            termination = await self._recorded_turn(draft)
            if termination is not None:
                return termination
            recorded += len(draft.messages)
        return _ended(Cause.MAX_TURNS, f"no final answer within {self._settings.max_turns} turns")

    async def _recorded_turn(self, draft: TurnDraft) -> Termination | None:
        try:
            termination = await self._turn(draft)
        except BaseException:
            if record := draft.record():
                await self._store_last(record)
            raise
        if record := draft.record():
            await self._store(record)
        return termination

    async def _turn(self, draft: TurnDraft) -> Termination | None:
        """One turn; the termination if it was the last one."""
        try:
            call = await self._conversation.sample(draft.turn)
        except ContextOverflow as exc:
            return _ended(Cause.CONTEXT_OVERFLOW, str(exc))
        draft.model_call = call
        draft.add_message({"role": "assistant", "content": call.text})
        reply = parse_reply(call.text, self._signatures)
        self.final_text = reply.content
        if call.finish_reason == "length":
            return _ended(Cause.LENGTH, "a reply reached the token limit of a turn")
        if call.finish_reason == "content_filter":
            return _ended(Cause.REFUSAL, "the model server's filter stopped a reply")
        if not reply.calls and not reply.errors:
            return _ended(Cause.COMPLETED)
        return await self._answer_calls(draft, reply)

    async def _answer_calls(self, draft: TurnDraft, reply: ParsedReply) -> Termination | None:
        """Run the calls of a reply in order and tell the model what came of each; the termination if one ended the rollout."""
        carried_out = False
        for request in reply.calls:
            draft.start_call(request)
            result, valid = await self._call(request)
            draft.end_call(result)
            await self._show(draft, result, name=request.name)
            if result.limit_exceeded:
                return _ended(Cause.SANDBOX_LIMIT, f"{result.limit_exceeded}: a call of {request.name} exceeded it")
            carried_out = carried_out or valid
        for error in reply.errors:
            draft.start_call(ToolCallRequest("", {}, ""))
            draft.end_call(ToolResult("", error=error))
            self._tell(draft, f"Error: {error}")
        self._malformed_in_a_row = 0 if carried_out else self._malformed_in_a_row + 1
        if self._malformed_in_a_row >= self._settings.max_malformed:
            return _ended(Cause.MALFORMED_TOOL_CALL, f"{self._malformed_in_a_row} turns in a row without one valid tool call")
        return None

    async def _call(self, request: ToolCallRequest) -> tuple[ToolResult, bool]:
        """The result, and whether the call was valid."""
        tool = self._tools[request.name]
        try:
            arguments = tool.arguments.model_validate(request.arguments)
        except ValidationError as exc:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in exc.errors())
            return ToolResult("", error=f"invalid arguments for {tool.name}: {problems}"), False
        limit = self._settings.tool_timeout
        if self._budget is not None:
            limit = self._budget.limit_action(limit)
        try:
            async with asyncio.timeout(limit + _TOOL_GRACE_SECONDS) as deadline:
                return await tool.call(arguments, timeout=limit), True
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise EnvironmentFailed(f"the tool {tool.name} ignored its time limit of {limit:g} s", retryable=True) from exc

    async def _show(self, draft: TurnDraft, result: ToolResult, *, name: str) -> None:
        """Tell the model what came of a call. If another server is asked in the end, that one has to see as well."""
        choice = none_shown(result.pictures)
        may_show = self._settings.max_result_pictures and not result.limit_exceeded  # after which no model is asked
        if may_show and self._conversation.takes_pictures:
            can_show = functools.partial(self._conversation.can_show, role=self._settings.tool_result_role)
            choice = await self._pictures.choose(result.pictures, can_show)
        text = render_result(result, max_chars=self._settings.max_result_chars, more_notes=choice.notes)
        self._tell(draft, text, *choice.shown, name=name)

    def _tell(self, draft: TurnDraft, text: str, *pictures: Picture, name: str = "") -> None:
        message = picture_message(text, *pictures, role=self._settings.tool_result_role)
        self._conversation.append(message)
        draft.add_message(message, name=name)

    async def _store(self, record: TurnRecord) -> None:
        write = asyncio.create_task(self._recorder.turn(record))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await _let_finish(write)  # half stored would be neither lost nor there
            raise
        except AttemptSuperseded:
            raise
        except Exception as exc:
            raise StoreFailed(f"turn {record.turn} could not be stored: {describe(exc)}") from exc

    async def _store_last(self, record: TurnRecord) -> None:
        """Store a turn that was cut short. Why is already decided, so nothing comes of a failure."""
        await _let_finish(asyncio.create_task(self._recorder.turn(record)))


async def _let_finish(write: asyncio.Task[None]) -> None:
    """Give a last write its time, and no more."""
    try:
        await asyncio.wait({write}, timeout=_LAST_WRITE_SECONDS)
    finally:
        write.cancel()
    if write.done() and not write.cancelled() and (exc := write.exception()) is not None:
        logger.warning("last turn not stored", error=describe(exc))


def _ended(cause: Cause, detail: str = "") -> Termination:
    return Termination(Phase.RUN, cause, detail)
