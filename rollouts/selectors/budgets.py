"""How much of its limits, and of its project's, a run has used."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import Count, Sum

from rollouts.lifecycle import ACTIVE, Limit
from rollouts.models import Project, Rollout, Run
from rollouts.models.usage import LIVE_SANDBOX_SECONDS, TOKENS


class LimitUse(NamedTuple):
    """One limit that is set. `scope` is run or project; `used` includes what is in flight."""

    scope: str
    limit: Limit
    used: float
    maximum: int

    @property
    def in_seconds(self) -> bool:
        return self.limit in (Limit.MAX_SANDBOX_SECONDS, Limit.MAX_WALL_SECONDS)

    @property
    def reached(self) -> bool:
        return self.used >= self.maximum


def limit_uses(run: Run) -> list[LimitUse]:
    """Every limit that holds for the run; the run's own first. Costs no query where none is set."""
    return [*_uses("run", run), *_uses("project", run.project)]


def in_flight_limits_reached(run: Run) -> list[LimitUse]:
    """The `max_in_flight` that hold back the run's queued rollouts now."""
    return [use for use in limit_uses(run) if use.limit is Limit.MAX_IN_FLIGHT and use.reached]


def _uses(scope: str, owner: Run | Project) -> list[LimitUse]:
    maxima = {limit: maximum for limit in Limit if (maximum := owner.maximum(limit)) is not None}
    if not maxima:
        return []
    in_flight = Rollout.objects.filter(state__in=[state.value for state in ACTIVE], **{scope: owner}).aggregate(
        n=Count("id"), tokens=Sum(TOKENS, default=0), seconds=Sum(LIVE_SANDBOX_SECONDS, default=0.0)
    )
    used = owner.use
    used[Limit.MAX_IN_FLIGHT] = in_flight["n"]
    used[Limit.MAX_TOKENS] += in_flight["tokens"]
    used[Limit.MAX_SANDBOX_SECONDS] += in_flight["seconds"]
    return [LimitUse(scope, limit, used[limit], maximum) for limit, maximum in maxima.items()]
