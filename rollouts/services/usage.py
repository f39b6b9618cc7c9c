"""What finished rollouts have used is counted, each once; where a budget has run out, what waits is cancelled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Count, F, Q, Sum
from django.utils import timezone

from rollouts.lifecycle import ACTIVE, Cause, Limit, OnBudget, Phase, State, Termination
from rollouts.models import Project, Rollout, Run
from rollouts.models.limits import HAS_BUDGET
from rollouts.models.usage import LIVE_SANDBOX_SECONDS, SANDBOX_SECONDS, TOKENS

from . import feed
from .cancel import stop
from .finish import termination_values
from .transition import Guard, move

_BATCH = 1000


def keep_accounts() -> None:
    """Count what has finished, find the budgets that have run out, and stop what they stop. For one process at a time."""
    while feed.advance("usage", _count) == feed.BATCH:
        pass
    for model in (Project, Run):
        _mark_exhausted(model)
    for run in _runs_to_stop():
        _stop_run(run)


def _count(finished: list[UUID]) -> None:
    """Add finished rollouts to the use of their projects and runs; projects first, as in admission."""
    _add(Project, "project_id", finished)
    _add(Run, "run_id", finished)


def _add(model: type[Project | Run], column: str, finished: list[UUID]) -> None:
    rows = Rollout.objects.filter(id__in=finished).order_by(column).values_list(column)
    for pk, n, tokens, seconds in rows.annotate(n=Count("id"), tokens=Sum(TOKENS), seconds=Sum(SANDBOX_SECONDS)):
        model.objects.filter(pk=pk).update(
            finished_rollouts=F("finished_rollouts") + n,
            used_tokens=F("used_tokens") + tokens,
            used_sandbox_seconds=F("used_sandbox_seconds") + seconds,
        )


def live_use(owner: Project | Run) -> dict[Limit, float]:
    """What rollouts in flight have used so far, earlier attempts included."""
    return _live_use(type(owner), [owner.pk]).get(owner.pk, {})


def _live_use(model: type[Project | Run], owners: Iterable[UUID]) -> dict[UUID, dict[Limit, float]]:
    column = "run_id" if model is Run else "project_id"
    rows = (
        Rollout.objects.filter(state__in=[state.value for state in ACTIVE], **{f"{column}__in": list(owners)})
        .order_by()
        .values_list(column)
        .annotate(tokens=Sum(TOKENS), seconds=Sum(LIVE_SANDBOX_SECONDS))
    )
    return {pk: {Limit.MAX_TOKENS: tokens, Limit.MAX_SANDBOX_SECONDS: seconds} for pk, tokens, seconds in rows}


def _mark_exhausted(model: type[Project | Run]) -> None:
    spent = Q(used_tokens__gte=F("max_tokens")) | Q(used_sandbox_seconds__gte=F("max_sandbox_seconds"))
    going = Q(finished_rollouts__lt=F("used_rollouts"))
    # One that is over its time with nothing left to stop is not news; admission looks at the clock itself.
    limited: list[Any] = list(model.objects.filter(HAS_BUDGET, spent | going, exhausted_at=None))
    live = _live_use(model, [owner.pk for owner in limited])
    for owner in limited:
        limit = owner.budget_reached(live.get(owner.pk, {}))
        if limit is not None:
            # Unless somebody has raised it meanwhile.
            unchanged = model.objects.filter(pk=owner.pk, exhausted_at=None, **{limit.value: owner.maximum(limit)})
            unchanged.update(exhausted_at=timezone.now(), exhausted_by=limit.value)


def _runs_to_stop() -> list[Run]:
    """Also those that were stopped before: a rollout in flight may have gone back to the queue."""
    going = Run.objects.filter(finished_rollouts__lt=F("used_rollouts")).select_related("project")
    spent_projects = list(Project.objects.filter(exhausted_at__isnull=False).values_list("pk", flat=True))
    return [*going.filter(exhausted_at__isnull=False), *going.filter(exhausted_at=None, project__in=spent_projects)]


def _stop_run(run: Run) -> None:
    """End what is queued. What is in flight ends by itself or is stopped, as the run's settings say."""
    while _end_queued(run):
        pass
    if run.settings.get("on_budget") == OnBudget.CANCEL.value:
        _stop_in_flight(run)


def _end_queued(run: Run) -> int:
    """A batch of them; how many."""
    with transaction.atomic():
        reason = _reason_to_stop(run)
        if not reason:
            return 0
        queued = Rollout.objects.filter(run=run, state=State.QUEUED.value).order_by("id")
        termination = Termination(Phase.QUEUE, Cause.BUDGET_EXHAUSTED, reason)
        moved = move(
            list(queued.values_list("id", flat=True)[:_BATCH]),
            to=State.CANCELLED,
            guard=Guard([State.QUEUED], unheld=True),
            values={**termination_values(termination), "reward": None, "trainable": False},
            data={"cause": termination.cause.value},
        )
    return len(moved)


def _stop_in_flight(run: Run) -> None:
    with transaction.atomic():
        if not _reason_to_stop(run):
            return
        in_flight = Rollout.objects.filter(run=run, state__in=[state.value for state in ACTIVE], cancel_requested_at=None)
        ids = list(in_flight.select_for_update().order_by("id").values_list("id", flat=True))
        Rollout.objects.filter(id__in=ids).update(cancel_cause=Cause.BUDGET_EXHAUSTED.value)
        stop(ids)


def _reason_to_stop(run: Run) -> str:
    """Empty when the limit was raised meanwhile. Else nobody raises it, and submits more, until the transaction ends."""
    scope, owner = ("run", run) if run.exhausted_at is not None else ("project", run.project)
    spent: Any = type(owner).objects.select_for_update(no_key=True).filter(pk=owner.pk, exhausted_at__isnull=False).first()
    return f"{spent.exhausted_by} of the {scope} is used up" if spent else ""
