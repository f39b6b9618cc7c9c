"""Traces of finished rollouts for OpenTelemetry: rollout > stage > model call, tool call.

Built from the record by the dispatcher, when PRORL_OTEL_ENDPOINT is set; workers know nothing of it. The trace id is the
rollout's id, so it is found from any log line or page, and the reverse. Best effort: what cannot be sent in time is dropped.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.db.models import Max
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from rollouts.lifecycle import Blame, EventKind, State
from rollouts.models import FeedCursor, ModelCall, Rollout, RolloutEvent, ToolCall
from rollouts.services import feed

CONSUMER = "traces"
# Thousands of rollouts' spans may wait while the collector is slow; more is dropped.
_QUEUE = 65_536
_STAGES = {State.INITIALIZING.value: "init", State.RUNNING.value: "run", State.EVALUATING.value: "eval"}


class _Part(NamedTuple):
    """A span to be: something that took time inside a stage."""

    name: str
    begun: datetime
    ended: datetime
    attributes: dict[str, AttributeValue]


class _RolloutIds(RandomIdGenerator):
    """Traces have their rollout's id."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


class Traces:
    """Sends traces to one collector, from a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        _begin_now()
        self._ids = _RolloutIds()
        resource = Resource.create({"service.name": "prorl"})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint), max_queue_size=_QUEUE))
        self._tracer: Tracer = self._provider.get_tracer("prorl")

    def export(self) -> None:
        """Send the traces of what has finished since the last time."""
        while feed.advance(CONSUMER, self._trace_all) == feed.BATCH:
            pass

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()

    def _trace_all(self, ids: list[UUID]) -> None:
        rollouts = Rollout.objects.filter(id__in=ids).select_related("project", "environment").defer("artefacts")
        events, parts = _events(ids), _parts(ids)
        for rollout in rollouts:
            self._trace(rollout, events[rollout.id], parts[rollout.id])

    def _trace(self, rollout: Rollout, events: list[RolloutEvent], parts: dict[int, list[_Part]]) -> None:
        self._ids.trace_id = rollout.id.int
        assert rollout.finished_at is not None  # noqa: S101 - the feed is of finished ones
        root = self._begin("rollout", rollout.created_at, None, _attributes(rollout))
        if rollout.termination_blame == Blame.INFRASTRUCTURE.value:
            root.set_status(Status(StatusCode.ERROR, rollout.termination_detail))
        for stage in _stages(events):
            span = self._begin(stage.name, stage.begun, root, stage.attributes)
            for part in parts[int(str(stage.attributes["prorl.attempt"]))] if stage.name == "run" else ():
                _end(self._begin(part.name, part.begun, span, part.attributes), part.ended)
            _end(span, stage.ended)
        _end(root, rollout.finished_at)

    def _begin(self, name: str, at: datetime, parent: Span | None, attributes: dict[str, AttributeValue]) -> Span:
        context = set_span_in_context(parent) if parent else None
        return self._tracer.start_span(name, context, start_time=_nanoseconds(at), attributes=attributes)


def _begin_now() -> None:
    """Where traces were not sent before, what finished in the past is not sent either."""
    if not FeedCursor.objects.filter(consumer=CONSUMER).exists():
        newest = Rollout.objects.aggregate(xid=Max("finished_xid"))["xid"]
        FeedCursor.objects.get_or_create(consumer=CONSUMER, defaults={"xid": newest or 0})


_traces: Traces | None = None


def export_traces() -> None:
    """The dispatcher's step."""
    global _traces
    if _traces is None:
        _traces = Traces(settings.OTEL_ENDPOINT)
    _traces.export()


def _attributes(rollout: Rollout) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue | None] = {
        "prorl.rollout": str(rollout.id),
        "prorl.run": str(rollout.run_id),
        "prorl.group": str(rollout.group_id),
        "prorl.project": rollout.project.name,
        "prorl.environment": rollout.environment.name,
        "prorl.state": rollout.state,
        "prorl.cause": rollout.termination_cause,
        "prorl.blame": rollout.termination_blame,
        "prorl.attempts": rollout.attempt,
        "prorl.turns": rollout.turns,
        "prorl.reward": rollout.reward,
    }
    return {name: value for name, value in found.items() if value is not None}


def _events(ids: list[UUID]) -> defaultdict[UUID, list[RolloutEvent]]:
    found: defaultdict[UUID, list[RolloutEvent]] = defaultdict(list)
    moves = [kind.value for kind in (EventKind.TRANSITION, EventKind.CLAIMED, EventKind.RELEASED, EventKind.REQUEUED)]
    for event in RolloutEvent.objects.filter(rollout_id__in=ids, kind__in=moves).order_by("id"):
        found[event.rollout_id].append(event)
    return found


def _stages(events: list[RolloutEvent]) -> Iterator[_Part]:
    """From each claim to the event after it."""
    for event, following in itertools.pairwise(events):
        held = event.to_state in _STAGES and (event.to_state != State.EVALUATING.value or event.kind == EventKind.CLAIMED.value)
        if held:
            attributes = {"prorl.attempt": event.attempt, "prorl.node": event.data.get("node", "")}
            yield _Part(_STAGES[event.to_state], event.at, following.at, {**attributes, "prorl.led_to": following.to_state})


def _parts(ids: list[UUID]) -> defaultdict[UUID, defaultdict[int, list[_Part]]]:
    """Model calls and tool calls, by rollout and attempt."""
    found: defaultdict[UUID, defaultdict[int, list[_Part]]] = defaultdict(lambda: defaultdict(list))
    first_tool: dict[tuple[UUID, int, int], datetime] = {}
    tools = ToolCall.objects.filter(rollout_id__in=ids).only(
        "rollout_id", "attempt", "turn", "name", "started_at", "duration", "timed_out", "exit_code"
    )
    for tool in tools.order_by("started_at"):
        first_tool.setdefault((tool.rollout_id, tool.attempt, tool.turn), tool.started_at)
        attributes: dict[str, AttributeValue] = {"prorl.turn": tool.turn, "prorl.timed_out": tool.timed_out}
        ended = tool.started_at + timedelta(seconds=tool.duration)
        found[tool.rollout_id][tool.attempt].append(_Part(f"tool {tool.name}", tool.started_at, ended, attributes))
    for call in _calls(ids):
        # `at` is when the turn was stored, its tools included; the call itself was over before the first of them began.
        ended = min(call.at, first_tool.get((call.rollout_id, call.attempt, call.turn), call.at))
        found[call.rollout_id][call.attempt].append(
            _Part(
                "model call",
                ended - timedelta(seconds=call.latency),
                ended,
                {
                    "prorl.turn": call.turn,
                    "prorl.policy": call.policy,
                    "prorl.policy_version": call.policy_version,
                    "prorl.prompt_tokens": call.prompt_tokens,
                    "prorl.finish_reason": call.finish_reason,
                },
            )
        )
    return found


def _calls(ids: list[UUID]) -> Iterable[ModelCall]:
    """Without tokens and texts, which are most of a row."""
    return ModelCall.objects.filter(rollout_id__in=ids).only(
        *("rollout_id", "attempt", "turn", "at", "latency", "policy", "policy_version", "prompt_tokens", "finish_reason")
    )


def _end(span: Span, at: datetime) -> None:
    span.end(_nanoseconds(at))


def _nanoseconds(at: datetime) -> int:
    return int(at.timestamp() * 1_000_000) * 1000
