"""Which messages a finished rollout makes: rows for the endpoints that want them, written once for each event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count, Q
from django.utils import timezone

from rollouts.lifecycle import UNFINISHED
from rollouts.models import Group, Rollout, Run, WebhookDelivery, WebhookEndpoint, WebhookEvent

from .feed import advance

# Named, so that an index finds the few of a run that has a million finished ones.
_UNFINISHED = Q(state__in=[state.value for state in UNFINISHED])


def record_events() -> int:
    """Write the messages that follow from the next finished rollouts, and from budgets that ran out; how many rollouts.

    What an endpoint was told of is unique by the event's key, so a group or a run that is found finished twice (rollouts of it
    may come in two batches while all have ended) is told of once.
    """
    _record_exhausted_runs()
    return advance("webhooks", _record_finished)


def _record_finished(ids: list[UUID]) -> None:
    endpoints = list(WebhookEndpoint.objects.filter(disabled_at=None))
    if not endpoints:
        return
    rollouts = list(Rollout.objects.filter(id__in=ids, project__in={e.project_id for e in endpoints}).defer("artefacts"))
    wanted = {event for endpoint in endpoints for event in endpoint.event_types}
    events = [_rollout_finished(rollout) for rollout in rollouts] if WebhookEvent.ROLLOUT_FINISHED in wanted else []
    if WebhookEvent.GROUP_FINISHED in wanted:
        events += _groups_finished({rollout.group_id for rollout in rollouts})
    if WebhookEvent.RUN_FINISHED in wanted:
        events += _runs_finished({rollout.run_id for rollout in rollouts})
    _store(events, endpoints)


def _record_exhausted_runs() -> None:
    endpoints = list(
        WebhookEndpoint.objects.filter(disabled_at=None, event_types__contains=[WebhookEvent.RUN_BUDGET_EXHAUSTED])
    )
    if not endpoints:
        return
    since = min(endpoint.created_at for endpoint in endpoints)
    runs = Run.objects.filter(exhausted_at__gte=since, project__in={endpoint.project_id for endpoint in endpoints})
    _store([_run_exhausted(run) for run in runs], endpoints)


class _Event:
    """Something that happened to one run: what it is called, what makes it unique, and what is told."""

    def __init__(self, kind: WebhookEvent, key: str, project: UUID, run: UUID, at: datetime, data: dict[str, Any]) -> None:
        self.kind = kind
        self.key = f"{kind.value}:{key}"
        self.project = project
        self.run = run
        self.payload = {"type": kind.value, "timestamp": at.isoformat(), "data": data}

    def concerns(self, endpoint: WebhookEndpoint) -> bool:
        return self.kind in endpoint.event_types and endpoint.run_id in (None, self.run)


def _store(events: Iterable[_Event], endpoints: Sequence[WebhookEndpoint]) -> None:
    by_project: dict[UUID, list[WebhookEndpoint]] = defaultdict(list)
    for endpoint in endpoints:
        by_project[endpoint.project_id].append(endpoint)
    WebhookDelivery.objects.bulk_create(
        [
            WebhookDelivery(endpoint=endpoint, event_type=event.kind, event_key=event.key, payload=event.payload)
            for event in events
            for endpoint in by_project[event.project]
            if event.concerns(endpoint)
        ],
        batch_size=1000,
        ignore_conflicts=True,
    )


def _rollout_finished(rollout: Rollout) -> _Event:
    at = rollout.finished_at or timezone.now()
    data = {
        "rollout": str(rollout.id),
        "group": str(rollout.group_id),
        "run": str(rollout.run_id),
        "task": str(rollout.task_id),
        "index": rollout.index,
        "state": rollout.state,
        "cause": rollout.termination_cause,
        "blame": rollout.termination_blame,
        "reward": rollout.reward,
        "trainable": rollout.trainable,
        "finished_at": at.isoformat(),
        "links": {
            "rollout": f"/api/v1/rollouts/{rollout.id}/",
            "trajectory": f"/api/v1/rollouts/{rollout.id}/trajectory/",
        },
    }
    return _Event(WebhookEvent.ROLLOUT_FINISHED, str(rollout.id), rollout.project_id, rollout.run_id, at, data)


def _groups_finished(ids: set[UUID]) -> list[_Event]:
    unfinished = Rollout.objects.filter(_UNFINISHED, group__in=ids).values_list("group_id", flat=True)
    done = Group.objects.filter(id__in=ids - set(unfinished)).select_related("run")
    counts = _counts("group_id", [group.id for group in done])
    return [
        _Event(
            WebhookEvent.GROUP_FINISHED,
            str(group.id),
            group.run.project_id,
            group.run_id,
            timezone.now(),
            {
                "group": str(group.id),
                "run": str(group.run_id),
                "task": str(group.task_id),
                "counts": counts[group.id],
                "links": {"group": f"/api/v1/groups/{group.id}/", "results": f"/api/v1/runs/{group.run_id}/results/"},
            },
        )
        for group in done
    ]


def _runs_finished(ids: set[UUID]) -> list[_Event]:
    """A run is open for more groups, so it can be finished more than once: the number of its rollouts tells these apart."""
    done = [run for run in Run.objects.filter(id__in=ids) if not Rollout.objects.filter(_UNFINISHED, run=run).exists()]
    counts = _counts("run_id", [run.id for run in done])
    return [
        _Event(
            WebhookEvent.RUN_FINISHED,
            f"{run.id}:{sum(counts[run.id].values())}",
            run.project_id,
            run.id,
            timezone.now(),
            {"run": str(run.id), "counts": counts[run.id], "links": _run_links(run)},
        )
        for run in done
    ]


def _run_exhausted(run: Run) -> _Event:
    at = run.exhausted_at or timezone.now()
    data = {"run": str(run.id), "exhausted_by": run.exhausted_by, "links": _run_links(run)}
    return _Event(WebhookEvent.RUN_BUDGET_EXHAUSTED, f"{run.id}:{at.isoformat()}", run.project_id, run.id, at, data)


def _run_links(run: Run) -> dict[str, str]:
    return {"run": f"/api/v1/runs/{run.id}/", "results": f"/api/v1/runs/{run.id}/results/"}


def _counts(column: str, ids: list[UUID]) -> dict[UUID, dict[str, int]]:
    """State -> number of rollouts, for each id."""
    found: dict[UUID, dict[str, int]] = {id_: {} for id_ in ids}
    rows = Rollout.objects.filter(**{f"{column}__in": ids}).order_by().values_list(column, "state").annotate(Count("id"))
    for id_, state, count in rows:
        found[id_][state] = count
    return found
