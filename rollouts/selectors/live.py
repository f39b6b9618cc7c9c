"""A rollout or a run while it goes on: cheap facts that change when something happens, and what is new behind a place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple
from uuid import UUID

from django.db.models import Count, Max

from rollouts.lifecycle import TERMINAL, State
from rollouts.models import Rollout, RolloutEvent

from .rollouts import events_of
from .timeline import Turn, turns


class Place(NamedTuple):
    """How far somebody has followed a rollout: the last row of its history, and the last turn of an attempt."""

    event: int = 0
    attempt: int = 0
    turn: int = -1


class News(NamedTuple):
    """What came behind a place, in order. `ended` tells that nothing more will come."""

    rollout: Rollout
    items: list[tuple[RolloutEvent | Turn, Place]]
    ended: bool


def rollout_facts(ids: Collection[UUID]) -> dict[UUID, tuple[object, ...]]:
    """Something about each rollout that changes with every row of its history and with every turn."""
    rows = Rollout.objects.filter(id__in=ids).order_by().annotate(last=Max("events__id"))
    return {id_: facts for id_, *facts in rows.values_list("id", "attempt", "turns", "state", "last")}  # type: ignore[misc]


def news_of(rollout_id: UUID, place: Place) -> News:
    """What happened to a rollout since `place`. Of attempts that were given up meanwhile the turns are left out."""
    # The rollout is read first: whatever ended it was committed with all that came before.
    rollout = Rollout.objects.select_related("environment", "task").defer("artefacts", "task__payload").get(id=rollout_id)
    history = list(events_of(rollout).filter(id__gt=place.event).order_by("id"))
    new = turns(rollout, after=place.turn if place.attempt == rollout.attempt else -1)
    ran = next((i for i, event in enumerate(history) if _comes_after_turns(event, rollout)), len(history))
    in_order: list[RolloutEvent | Turn] = [*history[:ran], *new, *history[ran:]]
    items = []
    for item in in_order:
        if isinstance(item, Turn):
            place = place._replace(attempt=rollout.attempt, turn=item.number)
        else:
            place = place._replace(event=item.id)
        items.append((item, place))
    return News(rollout, items, rollout.state in TERMINAL)


def _comes_after_turns(event: RolloutEvent, rollout: Rollout) -> bool:
    return event.attempt == rollout.attempt and event.from_state in (State.RUNNING, State.EVALUATING)


class RunProgress(NamedTuple):
    """How many rollouts of a run are in each state."""

    counts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(count for _, count in self.counts)

    @property
    def ended(self) -> int:
        return sum(count for state, count in self.counts if state in TERMINAL)


def run_progress(ids: Collection[UUID]) -> dict[UUID, RunProgress]:
    """The progress of several runs in one query."""
    found: dict[UUID, Counter[str]] = {id_: Counter() for id_ in ids}
    for run_id, state, count in (
        Rollout.objects.filter(run__in=ids).order_by().values_list("run_id", "state").annotate(Count("id"))
    ):
        found[run_id][state] = count
    return {id_: RunProgress(tuple((state.value, counts[state.value]) for state in State)) for id_, counts in found.items()}
