"""A rollout's newest attempt as a trainer and a reader see it: messages, calls with their tokens, segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar
from uuid import UUID

from django.db.models import F, QuerySet

from rollouts.llm.buffer import Exchange, Segment, TokenBuffer, reconstruct, validate
from rollouts.llm.types import ModelCallRecord, PlacedPicture, VersionSpan
from rollouts.models import Message, MessagePicture, ModelCall, Rollout, ToolCall, ToolPicture
from rollouts.selectors.storage import whole_output

_Row = TypeVar("_Row", Message, MessagePicture, ModelCall, ToolCall, ToolPicture)


@dataclass
class Trajectory:
    """Rows of one attempt, in order."""

    rollout: Rollout
    messages: list[Message] = field(default_factory=list)
    message_pictures: list[MessagePicture] = field(default_factory=list)
    model_calls: list[ModelCall] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_pictures: list[ToolPicture] = field(default_factory=list)

    @cached_property
    def token_problem(self) -> str:
        """Why the stored calls cannot be what was sent and sampled, naming the turn; empty when they can."""
        try:
            validate(map(record_of, self._calls_with_ids))
        except ValueError as error:
            return str(error)
        return ""

    def segments(self) -> list[Segment]:
        """The trainer's view: append-only sequences with a mask of what was sampled.

        Empty when the server gave no ids, and when there is a `token_problem`: nobody is to train on what was not sampled.
        """
        return [] if self.token_problem else TokenBuffer.from_calls(map(record_of, self._calls_with_ids)).segments

    def exchanges(self) -> list[Exchange]:
        """The full prompt of every model call, beside what was sampled; empty when there is a `token_problem`."""
        return [] if self.token_problem else reconstruct(map(record_of, self.model_calls))

    @property
    def _calls_with_ids(self) -> list[ModelCall]:
        return self.model_calls if any(call.sampled_ids for call in self.model_calls) else []


def trajectories(rollouts: Sequence[Rollout], *, excerpts: bool = False) -> dict[UUID, Trajectory]:
    """The trajectories of several rollouts in five queries. A rollout that has not run yet has an empty one.

    Large tool outputs are read from the blob storage unless `excerpts` of them will do. Raises `BlobUnreadable`.
    """
    found = {rollout.id: Trajectory(rollout) for rollout in rollouts}
    for message in _newest(Message, found).order_by("rollout_id", "index"):
        found[message.rollout_id].messages.append(message)
    for seen in _newest(MessagePicture, found).select_related("blob").order_by("rollout_id", "message", "index"):
        found[seen.rollout_id].message_pictures.append(seen)
    for call in _newest(ModelCall, found).order_by("rollout_id", "turn"):
        found[call.rollout_id].model_calls.append(call)
    for tool_call in _newest(ToolCall, found).select_related("output_blob").order_by("rollout_id", "turn", "index"):
        if not excerpts:
            tool_call.output = whole_output(tool_call)
        found[tool_call.rollout_id].tool_calls.append(tool_call)
    for displayed in _newest(ToolPicture, found).select_related("blob").order_by("rollout_id", "turn", "call", "index"):
        found[displayed.rollout_id].tool_pictures.append(displayed)
    return found


def stored_calls(rollout_id: UUID, attempt: int) -> list[ModelCallRecord]:
    """The model calls of one attempt, in order, as they were recorded."""
    calls = ModelCall.objects.filter(rollout_id=rollout_id, attempt=attempt).order_by("turn")
    return [record_of(call) for call in calls]


def message_count(rollout_id: UUID, attempt: int) -> int:
    """How many messages one attempt has."""
    return Message.objects.filter(rollout_id=rollout_id, attempt=attempt).count()


def _newest(model: type[_Row], ids: Iterable[UUID]) -> QuerySet[_Row]:
    """Older attempts stay for the history; they are not the trajectory."""
    return model._default_manager.filter(rollout_id__in=list(ids), attempt=F("rollout__attempt"))


def record_of(call: ModelCall) -> ModelCallRecord:
    """A stored call as the token code knows it."""
    return ModelCallRecord(
        turn=call.turn,
        segment=call.segment,
        context_ids=call.context_ids,
        sampled_ids=call.sampled_ids,
        logprobs=call.logprobs,
        text=call.text,
        finish_reason=call.finish_reason,
        prompt_tokens=call.prompt_tokens,
        policy=call.policy,
        policy_version=call.policy_version,
        server_id=str(call.server_id or ""),
        latency=call.latency,
        sampling=call.sampling,
        policy_version_last=call.policy_version_last,
        version_spans=tuple(VersionSpan(*span) for span in call.version_spans),
        opened_by=call.opened_by,
        parent_segment=call.parent_segment,
        dialect=call.dialect,
        conversation_key=call.conversation_key,
        placed=tuple(PlacedPicture(*place) for place in call.placed),
    )
