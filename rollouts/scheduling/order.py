"""The order in which queued rollouts start: projects share, priorities decide within a project, and no limit is passed."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from .load import Load


class Candidate(NamedTuple):
    """A queued rollout that could start now."""

    id: UUID
    priority: int


@dataclass
class WaitingRun:
    """A run with the first of its queued rollouts, in the order in which they should start."""

    id: UUID
    project_id: UUID
    policy_id: UUID
    max_in_flight: int | None
    project_max_in_flight: int | None
    candidates: deque[Candidate] = field(default_factory=deque)


class Start(NamedTuple):
    """A rollout to start, and where."""

    rollout_id: UUID
    node: str


def starts(load: Load, runs: Iterable[WaitingRun]) -> list[Start]:
    """Fill the room there is. The next rollout is always one of the project that has the fewest in flight.

    Of a project it is the one of the highest priority, the oldest of these. Equal projects go by that priority too. A run or
    project at its `max_in_flight` and a policy without room are passed over, so that they hold back nobody else.
    """
    nodes = [(-node.room_to_start, node.name) for node in load.nodes.values() if node.room_to_start]
    heapq.heapify(nodes)
    policies = {run.policy_id: load.policy_room_to_start(run.policy_id) for run in runs}
    by_project: defaultdict[UUID, list[WaitingRun]] = defaultdict(list)
    for run in runs:
        by_project[run.project_id].append(run)

    def first_of(project_id: UUID) -> list[tuple[int, tuple[int, UUID], WaitingRun]]:
        able = [
            run
            for run in by_project[project_id]
            if run.candidates
            and policies[run.policy_id]
            and _below(load.runs[run.id], run.max_in_flight)
            and _below(load.projects[project_id], run.project_max_in_flight)
        ]
        return [(load.projects[project_id], _urgency(run), run) for run in heapq.nsmallest(1, able, key=_urgency)]

    projects = [entry for project_id in by_project for entry in first_of(project_id)]
    heapq.heapify(projects)
    chosen = []
    while nodes and projects:
        _, _, run = heapq.heappop(projects)
        full, node = heapq.heappop(nodes)
        chosen.append(Start(run.candidates.popleft().id, node))
        load.runs[run.id] += 1
        load.projects[run.project_id] += 1
        policies[run.policy_id] -= 1
        if full + 1:
            heapq.heappush(nodes, (full + 1, node))
        for entry in first_of(run.project_id):
            heapq.heappush(projects, entry)
    return chosen


def _below(n: int, limit: int | None) -> bool:
    return limit is None or n < limit


def _urgency(run: WaitingRun) -> tuple[int, UUID]:
    """Smaller is sooner."""
    first = run.candidates[0]
    return -first.priority, first.id
