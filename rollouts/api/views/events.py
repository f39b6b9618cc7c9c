"""Event streams: a rollout or a run followed as it goes on (server-sent events)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from uuid import UUID

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request

from rollouts.api.base import ApiView, find
from rollouts.api.cursors import invalid_cursor
from rollouts.api.schema import documented
from rollouts.api.serializers.live import end_json, history_json, progress_json, reward_json, turn_json
from rollouts.api.streaming import (
    EVENT_STREAM,
    HEARTBEAT_SECONDS,
    EventStreamRenderer,
    ServerSentEvent,
    event_stream,
    in_thread,
)
from rollouts.api.watch import Watch, other_than
from rollouts.selectors.live import News, Place, RunProgress, news_of, rollout_facts, run_progress
from rollouts.selectors.results import newest_rewards
from rollouts.selectors.rollouts import rollouts_of, runs_of
from rollouts.selectors.timeline import Turn

_ROLLOUTS: Watch[tuple[object, ...]] = Watch(rollout_facts, seconds=0.25)
_RUNS: Watch[RunProgress] = Watch(run_progress, seconds=1.0)

_ENDED = "ended"  # closes the id of the last message


class _Stream(ApiView):
    renderer_classes = [JSONRenderer, EventStreamRenderer]

    def last_event_id(self, pattern: str) -> tuple[str, ...] | None:
        """The groups of what the client has seen last, or None at the beginning. Raises Problem `invalid_cursor`."""
        seen = self.request.headers.get("Last-Event-ID", "")
        if not seen:
            return None
        match = re.fullmatch(pattern, seen, re.ASCII)
        if match is None:
            raise invalid_cursor()
        return match.groups("")


class RolloutStream(_Stream):
    @documented(
        "follow_rollout",
        "What happens to a rollout, as it happens: `history`, `turn`, `reward`, `end`",
        OpenApiTypes.STR,
        status=(200, EVENT_STREAM),
    )
    def get(self, request: Request, id: UUID) -> HttpResponseBase:
        rollout = find(rollouts_of(self.project), id)
        seen = self.last_event_id(rf"(\d{{1,18}})\.(\d{{1,9}})\.(-?\d{{1,9}})(\.{_ENDED})?")
        if seen is None:
            return event_stream(_follow_rollout(rollout.id, Place()))
        *numbers, ended = seen
        if ended:
            return HttpResponse(status=204)  # tells browsers not to come back
        return event_stream(_follow_rollout(rollout.id, Place(*map(int, numbers))))


async def _follow_rollout(rollout_id: UUID, place: Place) -> AsyncIterator[ServerSentEvent | None]:
    known: tuple[object, ...] | None = None
    while True:
        messages, place, ended = await in_thread(_read, rollout_id, place)
        for message in messages:
            yield message
        if ended:
            return
        while (news := await _ROLLOUTS.news(rollout_id, other_than(known), timeout=HEARTBEAT_SECONDS)) is None:
            yield None
        known = news


def _read(rollout_id: UUID, place: Place) -> tuple[list[ServerSentEvent], Place, bool]:
    news = news_of(rollout_id, place)
    messages = []
    for item, place in news.items:
        if isinstance(item, Turn):
            messages.append(ServerSentEvent("turn", turn_json(item, place.attempt), _id(place)))
        else:
            messages.append(ServerSentEvent("history", history_json(item), _id(place)))
    return messages + (_ending(news, place) if news.ended else []), place, news.ended


def _ending(news: News, place: Place) -> list[ServerSentEvent]:
    rewards = newest_rewards([news.rollout])[news.rollout.id]
    return [
        ServerSentEvent("reward", reward_json(news.rollout, rewards), _id(place)),
        ServerSentEvent("end", end_json(news.rollout), f"{_id(place)}.{_ENDED}"),
    ]


def _id(place: Place) -> str:
    return ".".join(map(str, place))


class RunStream(_Stream):
    @documented(
        "follow_run",
        "A run's progress, as it changes: `progress`, and `end` when all rollouts submitted so far have ended",
        OpenApiTypes.STR,
        status=(200, EVENT_STREAM),
    )
    def get(self, request: Request, id: UUID) -> HttpResponseBase:
        run = find(runs_of(self.project), id)
        seen = self.last_event_id(rf"(\d{{1,18}})\.(\d{{1,18}})(\.{_ENDED})?")
        if seen and seen[2]:
            now = run_progress([run.id])[run.id]
            if now.ended == now.total == int(seen[1]):
                return HttpResponse(status=204)  # nothing was submitted since
        return event_stream(_follow_run(run.id))


async def _follow_run(run_id: UUID) -> AsyncIterator[ServerSentEvent | None]:
    """Progress is whole in each message, so a client that comes back just gets the newest."""
    known: RunProgress | None = None
    while True:
        news = await _RUNS.news(run_id, other_than(known), timeout=HEARTBEAT_SECONDS)
        if news is None:
            yield None
            continue
        known = news
        id_ = f"{news.ended}.{news.total}"
        yield ServerSentEvent("progress", progress_json(news), id_)
        if 0 < news.total == news.ended:
            yield ServerSentEvent("end", progress_json(news), f"{id_}.{_ENDED}")
            return
