"""Who waits for which stage, and for how long: the queue as it is now."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.db import connection

from rollouts.lifecycle import STAGES, TERMINAL, Stage, State


@dataclass
class StageWait:
    """Rollouts at one stage."""

    waiting: int = 0  # nobody holds them, and they could start now
    hinted: int = 0  # of these: a worker was told
    delayed: int = 0  # nobody holds them, and they are put off after a failure of the infrastructure
    held: int = 0
    since: dt.datetime | None = None  # from when the first of the waiting waits

    def add(self, other: StageWait) -> None:
        self.waiting += other.waiting
        self.hinted += other.hinted
        self.delayed += other.delayed
        self.held += other.held
        self.since = min(filter(None, (self.since, other.since)), default=None)


@dataclass
class Waits:
    """All stages, of one run or of several."""

    stages: dict[Stage, StageWait] = field(default_factory=lambda: {stage: StageWait() for stage in Stage})
    delayed_from: dt.datetime | None = None
    delayed_until: dt.datetime | None = None

    @property
    def unfinished(self) -> int:
        return sum(stage.waiting + stage.delayed + stage.held for stage in self.stages.values())

    @property
    def waiting(self) -> int:
        return sum(stage.waiting for stage in self.stages.values())

    @property
    def delayed(self) -> int:
        return sum(stage.delayed for stage in self.stages.values())

    @property
    def queued(self) -> int:
        """Not started."""
        init = self.stages[Stage.INIT]
        return init.waiting + init.delayed

    @property
    def in_flight(self) -> int:
        """Started and not finished."""
        return self.unfinished - self.queued

    @property
    def since(self) -> dt.datetime | None:
        return min((stage.since for stage in self.stages.values() if stage.since), default=None)

    def add(self, other: Waits) -> None:
        for stage, wait in other.stages.items():
            self.stages[stage].add(wait)


# In two parts, so that each can use the partial index made for it.
_COLUMNS = """
    run_id, state, lease_owner_id IS NOT NULL, count(*), count(*) FILTER (WHERE not_before > now()),
    count(hinted_at) FILTER (WHERE lease_owner_id IS NULL),
    min(state_changed_at) FILTER (WHERE lease_owner_id IS NULL AND (not_before IS NULL OR not_before <= now())),
    min(not_before) FILTER (WHERE not_before > now()), max(not_before) FILTER (WHERE not_before > now())
    FROM rollouts_rollout
"""
_WAITS = f"""
SELECT {_COLUMNS} WHERE state = 'queued' AND (%(all)s OR run_id = ANY(%(runs)s)) GROUP BY 1, 2, 3
UNION ALL
SELECT {_COLUMNS} WHERE NOT state = ANY(%(others)s) AND (%(all)s OR run_id = ANY(%(runs)s)) GROUP BY 1, 2, 3
"""
_STAGE_OF = {rule.holds_in.value: stage for stage, rule in STAGES.items()} | {
    rule.waits_in.value: stage for stage, rule in STAGES.items()
}


def waits_by_run(runs: list[UUID] | None = None) -> dict[UUID, Waits]:
    """Of every run that has unfinished rollouts, or only of these."""
    found: defaultdict[UUID, Waits] = defaultdict(Waits)
    parameters: dict[str, Any] = {"all": runs is None, "runs": runs or [], "others": [State.QUEUED.value, *sorted(TERMINAL)]}
    with connection.cursor() as cursor:
        cursor.execute(_WAITS, parameters)
        for run_id, state, held, n, delayed, hinted, since, delayed_from, delayed_until in cursor.fetchall():
            waits = found[run_id]
            wait = StageWait(held=n) if held else StageWait(n - delayed, hinted, delayed, since=since)
            waits.stages[_STAGE_OF[state]].add(wait)
            waits.delayed_from = min(filter(None, (waits.delayed_from, delayed_from)), default=None)
            waits.delayed_until = max(filter(None, (waits.delayed_until, delayed_until)), default=None)
    return dict(found)
