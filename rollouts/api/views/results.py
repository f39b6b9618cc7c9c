"""Delivery: a trainer pulls finished rollouts by long poll."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from django.db import connection
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, find
from rollouts.api.cursors import position_cursor, read_position
from rollouts.api.queries import ResultsQuery
from rollouts.api.schema import documented
from rollouts.api.serializers.trajectory import ResultSerializer, ResultsSerializer, packed_segment_json, trajectory_json
from rollouts.models import Rollout, Run
from rollouts.selectors.results import Position, Results, newest_rewards, results_after
from rollouts.selectors.rollouts import runs_of
from rollouts.selectors.segments import packed_segments
from rollouts.selectors.trajectory import trajectories

POLL_SECONDS = 0.25


class RunResults(ApiView):
    query_model = ResultsQuery

    @documented(
        "get_results", "Rollouts that have ended, each exactly once along the cursors", ResultsSerializer, query=ResultsQuery
    )
    def get(self, request: Request, id: UUID) -> Response:
        run = find(runs_of(self.project), id)
        after = read_position(self.query.after)
        found = _wait_for_results(run, after, limit=self.query.limit, wait=self.query.wait)
        return Response(
            {
                "results": _represent(found.rollouts, self.query.include),
                "next": position_cursor(found.last),
                "done": not found.outstanding,
            }
        )


def _wait_for_results(run: Run, after: Position, *, limit: int, wait: float) -> Results:
    """Look every quarter of a second until there is something to say. No database connection is held in between."""
    deadline = time.monotonic() + wait
    while True:
        found = results_after(run, after, limit)
        left = deadline - time.monotonic()
        if found.rollouts or not found.outstanding or left <= 0:
            return found
        connection.close()  # a hundred waiting trainers must not hold a hundred connections
        time.sleep(min(POLL_SECONDS, left))


def _represent(rollouts: list[Rollout], include: str) -> list[dict[str, Any]]:
    context = {"rewards": newest_rewards(rollouts)}
    rows = [dict(row) for row in ResultSerializer(rollouts, many=True, context=context).data]
    if include == "segments":
        packed = packed_segments(rollouts)
        for row, rollout in zip(rows, rollouts, strict=True):
            row["segments"] = [packed_segment_json(segment) for segment in packed[rollout.id]]
    if include == "trajectory":
        found = trajectories(rollouts)
        for row, rollout in zip(rows, rollouts, strict=True):
            row["trajectory"] = trajectory_json(found[rollout.id])
    return rows
