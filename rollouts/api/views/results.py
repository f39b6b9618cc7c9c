"""Delivery: a trainer pulls finished rollouts by long poll."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

from django.http.response import HttpResponseBase
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, find
from rollouts.api.binary import CompressedMsgpackRenderer, MsgpackRenderer
from rollouts.api.cursors import position_cursor, read_position
from rollouts.api.queries import ResultsQuery
from rollouts.api.schema import documented
from rollouts.api.serializers.segments import packed_segment_json, packed_segment_raw
from rollouts.api.serializers.trajectory import ResultSerializer, ResultsSerializer, trajectory_json
from rollouts.api.streaming import in_thread, later
from rollouts.api.watch import Watch
from rollouts.models import Rollout, Run
from rollouts.selectors.results import Position, Results, newest_positions, newest_rewards, results_after
from rollouts.selectors.rollouts import runs_of
from rollouts.selectors.segments import packed_tokens
from rollouts.selectors.trajectory import trajectories

_RESULTS: Watch[Position] = Watch(newest_positions, seconds=0.25)


class RunResults(ApiView):
    query_model = ResultsQuery
    renderer_classes = [JSONRenderer, MsgpackRenderer, CompressedMsgpackRenderer]

    @documented(
        "get_results", "Rollouts that have ended, each exactly once along the cursors", ResultsSerializer, query=ResultsQuery
    )
    def get(self, request: Request, id: UUID) -> HttpResponseBase:
        run = find(runs_of(self.project), id)
        after = read_position(self.query.after)
        found = results_after(run, after, self.query.limit)
        if found.rollouts or not found.outstanding or not self.query.wait:
            return Response(self._answer(found))
        return later(self._answer_later(run, after), str(request.accepted_renderer.media_type))

    async def _answer_later(self, run: Run, after: Position) -> AsyncIterator[str | bytes]:
        await _RESULTS.news(run.id, lambda newest: newest > after, timeout=self.query.wait)
        yield await in_thread(self._rendered, run, after)

    def _rendered(self, run: Run, after: Position) -> str | bytes:
        return self.request.accepted_renderer.render(self._answer(results_after(run, after, self.query.limit)))

    def _answer(self, found: Results) -> dict[str, Any]:
        raw = isinstance(self.request.accepted_renderer, MsgpackRenderer)
        return {
            "results": _represent(found.rollouts, self.query.include, raw=raw),
            "next": position_cursor(found.last),
            "done": not found.outstanding,
        }


def _represent(rollouts: list[Rollout], include: str, *, raw: bool) -> list[dict[str, Any]]:
    """`raw` leaves packed segments as bytes, which only MessagePack can carry."""
    context = {"rewards": newest_rewards(rollouts)}
    rows = [dict(row) for row in ResultSerializer(rollouts, many=True, context=context).data]
    if include == "segments":
        represent = packed_segment_raw if raw else packed_segment_json
        packed = packed_tokens(rollouts)
        for row, rollout in zip(rows, rollouts, strict=True):
            row["segments"] = [represent(segment) for segment in packed[rollout.id].segments]
            row["token_problem"] = packed[rollout.id].problem
    if include == "trajectory":
        found = trajectories(rollouts)
        for row, rollout in zip(rows, rollouts, strict=True):
            row["trajectory"] = trajectory_json(found[rollout.id])
    return rows
