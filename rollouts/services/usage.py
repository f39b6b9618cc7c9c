"""What finished rollouts have used is counted, each once; where a budget has run out, what waits is cancelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Case, Count, DurationField, ExpressionWrapper, F, Q, Sum, When
from django.db.models.functions import Extract, Now
from django.utils import timezone

from rollouts.lifecycle import ACTIVE, Cause, Limit, OnBudget, Phase, State, Termination
from rollouts.models import Project, Rollout, Run
from rollouts.models.limits import HAS_BUDGET

from . import feed
from .cancel import stop
from .finish import termination_values
from .transition import Guard, move

_BATCH = 1000

_HAD_SANDBOX = ~Q(sandbox_name="")
_TOKENS = F("earlier_tokens") + F("prompt_tokens") + F("sampled_tokens")
_SANDBOX_SECONDS = F("earlier_sandbox_seconds") + Case(
    When(_HAD_SANDBOX, then=F("init_seconds") + F("run_seconds") + F("eval_seconds")), default=0.0
)
# Of the stage that a worker is at; what is over is in the columns above.
_PRESENT_SECONDS = Case(
    When(
        _HAD_SANDBOX & Q(lease_owner__isnull=False),
        then=Extract(ExpressionWrapper(Now() - F("state_changed_at"), output_field=DurationField()), "epoch"),
    ),
    default=0.0,
)


def keep_accounts() -> None:
    """Count what has finished, find the budgets that have run out, and stop what they stop. For one process at a time."""
    while feed.advance("usage", _count) == feed.BATCH:
        pass
    for model in (Project, Run):
        _mark_exhausted(model)
    for run in _runs_to_stop():
        _stop_run(run)


def _count(finished: list[UUID]) -> None:
    """Add finished rollouts to the use of their projects and runs: projects first, as in admission."""
    rows = (
        Rollout.objects.filter(id__in=finished)
        .order_by("run_id")
        .values_list("project_id", "run_id")
        .annotate(Count("id"), Sum(_TOKENS), Sum(_SANDBOX_SECONDS))
    )
    projects: dict[UUID, Counter[str]] = {}
    runs: dict[UUID, Counter[str]] = {}
    for project_id, run_id, n, tokens, seconds in rows:
        used = Counter({"finished_rollouts": n, "used_tokens": tokens, "used_sandbox_seconds": seconds})
        runs[run_id] = used
        projects[project_id] = projects.get(project_id, Counter()) + used
    for pk, used in sorted(projects.items()):
        Project.objects.filter(pk=pk).update(**{name: F(name) + amount for name, amount in used.items()})
    for pk, used in sorted(runs.items()):
        Run.objects.filter(pk=pk).update(**{name: F(name) + amount for name, amount in used.items()})


def live_use(owner: Project | Run) -> dict[Limit, float]:
    """What rollouts in flight have used so far, earlier attempts included."""
    return _live_use(type(owner), [owner.pk]).get(owner.pk, {})


def _live_use(model: type[Project | Run], owners: Iterable[UUID]) -> dict[UUID, dict[Limit, float]]:
    column = "run_id" if model is Run else "project_id"
    rows = (
        Rollout.objects.filter(state__in=[state.value for state in ACTIVE], **{f"{column}__in": list(owners)})
        .order_by()
        .values_list(column)
        .annotate(Sum(_TOKENS), Sum(_SANDBOX_SECONDS + _PRESENT_SECONDS))
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
    owner = run if run.exhausted_by else run.project
    detail = f"{owner.exhausted_by} of {'run' if owner is run else 'project'} {owner.name} is used up"
    values = {
        **termination_values(Termination(Phase.QUEUE, Cause.BUDGET_EXHAUSTED, detail)),
        "reward": None,
        "trainable": False,
    }
    queued = Rollout.objects.filter(run=run, state=State.QUEUED.value).order_by("id").values_list("id", flat=True)
    while ids := list(queued[:_BATCH]):
        note = {"cause": Cause.BUDGET_EXHAUSTED.value}
        move(ids, to=State.CANCELLED, guard=Guard([State.QUEUED], unheld=True), values=values, data=note)
    if run.settings.get("on_budget") == OnBudget.CANCEL.value:
        with transaction.atomic():
            in_flight = Rollout.objects.filter(run=run, state__in=[state.value for state in ACTIVE], cancel_requested_at=None)
            ids = list(in_flight.select_for_update().order_by("id").values_list("id", flat=True))
            Rollout.objects.filter(id__in=ids).update(cancel_cause=Cause.BUDGET_EXHAUSTED.value)
            stop(ids)
