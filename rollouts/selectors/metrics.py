"""The numbers behind `/metrics`: gauges as the tables are now, counters and histograms as `services.metering` keeps them."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from django.db import connection
from django.db.models import Case, Count, Min, Q, Sum, Value, When
from django.utils import timezone

from rollouts import metrics
from rollouts.lifecycle import STAGES, TERMINAL, State
from rollouts.llm.server_metrics import SHOWN as LOAD_FIGURES
from rollouts.metrics import CATALOGUE, Kind, Metric
from rollouts.models import Blob, LLMServer, MetricSeries, RescuerPass, Rollout, WebhookDelivery, WorkerProcess
from sandboxes.models import Sandbox

Values = dict[tuple[str, ...], float]  # the labels' values, in the metric's order -> the number


class Observed(NamedTuple):
    """A histogram's state: how many fell at or below each bound (the last is +Inf), and their sum."""

    cumulative: list[tuple[str, float]]
    total: float


def gauges() -> dict[Metric, Values]:
    """Now. Each from an index or a small table, also with very many rollouts queued."""
    return {**_unfinished(), **_workers(), **_sandboxes(), **_servers(), **_dispatcher(), **_outside(), **_database()}


def counters() -> dict[Metric, Values]:
    """Since the beginning."""
    found: dict[Metric, Values] = {metric: {} for metric in CATALOGUE if metric.kind is Kind.COUNTER}
    by_name = {metric.name: metric for metric in found}
    for series in MetricSeries.objects.filter(name__in=by_name):
        metric = by_name[series.name]
        found[metric][_key(metric, series)] = series.value
    return found


def histograms() -> dict[Metric, dict[tuple[str, ...], Observed]]:
    """Since the beginning."""
    parts: dict[Metric, defaultdict[tuple[str, ...], dict[str, float]]]
    parts = {metric: defaultdict(dict) for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM}
    by_name = {metric.name: metric for metric in parts}
    for series in MetricSeries.objects.filter(name__in=by_name):
        metric = by_name[series.name]
        parts[metric][_key(metric, series)][series.part] = series.value
    return {metric: {key: _observed(metric, seen) for key, seen in found.items()} for metric, found in parts.items()}


def _key(metric: Metric, series: MetricSeries) -> tuple[str, ...]:
    return tuple(str(series.labels[label]) for label in metric.labels)


def _observed(metric: Metric, parts: dict[str, float]) -> Observed:
    counts = {float(part): value for part, value in parts.items() if part != MetricSeries.SUM}
    cumulative, so_far = [], 0.0
    for bound in (*metric.bounds, float("inf")):
        so_far += counts.get(bound, 0.0)
        cumulative.append(("+Inf" if bound == float("inf") else str(bound), so_far))
    return Observed(cumulative, parts.get(MetricSeries.SUM, 0.0))


# Two parts, so that each can use the partial index made for it.
_UNFINISHED = """
SELECT project.name, part.* FROM (
    SELECT project_id, state, true AS unheld, count(*), count(hinted_at),
        EXTRACT(EPOCH FROM now() - min(state_changed_at))::float8
    FROM rollouts_rollout WHERE state = 'queued' GROUP BY project_id, state
    UNION ALL
    SELECT project_id, state, lease_owner_id IS NULL, count(*), count(hinted_at),
        EXTRACT(EPOCH FROM now() - min(state_changed_at))::float8
    FROM rollouts_rollout WHERE NOT state = ANY(%s) GROUP BY project_id, state, lease_owner_id IS NULL
) part JOIN rollouts_project project ON project.id = part.project_id
"""
_STAGE_OF = {rule.waits_in.value: stage.value for stage, rule in STAGES.items()}


def _unfinished() -> dict[Metric, Values]:
    states: defaultdict[tuple[str, ...], float] = defaultdict(float)
    stages: list[tuple[str, ...]] = [(stage.value,) for stage in STAGES]
    depth, hinted, oldest = (dict.fromkeys(stages, 0.0) for _ in range(3))
    with connection.cursor() as cursor:
        cursor.execute(_UNFINISHED, [[State.QUEUED.value, *sorted(TERMINAL)]])
        rows = cursor.fetchall()
    for project, _, state, unheld, number, with_hint, age in rows:
        states[project, state] += number
        if unheld and state in _STAGE_OF:
            stage = (_STAGE_OF[state],)
            depth[stage] += number
            hinted[stage] += with_hint
            oldest[stage] = max(oldest[stage], age)
    return {
        metrics.ROLLOUTS: dict(states),
        metrics.QUEUE_DEPTH: depth,
        metrics.QUEUE_HINTED: hinted,
        metrics.QUEUE_OLDEST: oldest,
    }


def _workers() -> dict[Metric, Values]:
    live = WorkerProcess.objects.filter(stopped_at=None, lost_at=None, lease_expires_at__gt=timezone.now())
    rows = list(live.order_by().values("node", "stage").annotate(processes=Count("id"), slots=Sum("concurrency")))
    held = live.order_by().values_list("node", "stage").annotate(rollouts=Count("held"))
    return {
        metrics.WORKER_PROCESSES: {(row["node"], row["stage"]): row["processes"] for row in rows},
        metrics.WORKER_SLOTS: {(row["node"], row["stage"]): row["slots"] for row in rows},
        metrics.WORKER_HELD: {(node, stage): number for node, stage, number in held},
    }


def _sandboxes() -> dict[Metric, Values]:
    leftover, ready = Q(stop_attempts__gt=0), Q(ready_at__isnull=False)
    state = Case(When(leftover, then=Value("leftover")), When(ready, then=Value("ready")), default=Value("starting"))
    rows = Sandbox.objects.filter(stopped_at=None).order_by().values_list("node", state).annotate(number=Count("name"))
    return {metrics.SANDBOXES: {(node, state): number for node, state, number in rows}}


def _servers() -> dict[Metric, Values]:
    # From the rollouts that run, of which there is an index; from the servers' side it would be all they ever served.
    running = Rollout.objects.filter(llm_server__isnull=False, state=State.RUNNING.value).order_by()
    in_flight = dict(running.values_list("llm_server_id").annotate(Count("id")))
    rows = [((s.project.name, s.policy.name, s.url), s) for s in LLMServer.objects.select_related("project", "policy")]
    return {
        metrics.SERVER_UP: {key: float(server.state in ("live", "recovering") and not server.hold) for key, server in rows},
        metrics.SERVER_IN_FLIGHT: {key: in_flight.get(server.id, 0) for key, server in rows},
        metrics.SERVER_CAPACITY: {key: server.capacity for key, server in rows},
        metrics.SERVER_LOAD: {
            (*key, figure): server.load[figure] for key, server in rows for figure in LOAD_FIGURES if figure in server.load
        },
    }


# Counting stops at 100,000: beyond that only "very far" matters.
_BEHIND = """
SELECT consumer, (
    SELECT count(*) FROM (
        SELECT FROM rollouts_rollout r
        WHERE r.finished_xid IS NOT NULL AND (r.finished_xid, r.id) > (cursor.xid, cursor.rollout_id) LIMIT 100000
    ) later
) FROM rollouts_feedcursor cursor
"""


def _dispatcher() -> dict[Metric, Values]:
    with connection.cursor() as cursor:
        cursor.execute(_BEHIND)
        behind: Values = {(consumer,): number for consumer, number in cursor.fetchall()}
    last = RescuerPass.objects.first()
    age: Values = {(): (timezone.now() - last.at).total_seconds()} if last else {}
    return {metrics.FEED_BEHIND: behind, metrics.DISPATCHER_AGE: age}


def _outside() -> dict[Metric, Values]:
    """What is kept elsewhere, or is to go there."""
    pending = WebhookDelivery.objects.filter(state=WebhookDelivery.State.PENDING)
    webhooks = pending.aggregate(number=Count("id"), first=Min("created_at"))
    blobs = Blob.objects.aggregate(number=Count("sha256"), stored=Sum("stored_size"))
    age = (timezone.now() - webhooks["first"]).total_seconds() if webhooks["first"] else 0.0
    return {
        metrics.WEBHOOKS_PENDING: {(): webhooks["number"]},
        metrics.WEBHOOKS_OLDEST: {(): age},
        metrics.BLOBS: {(): blobs["number"]},
        metrics.BLOB_BYTES: {(): blobs["stored"] or 0},
    }


_ACTIVITY = """
SELECT COALESCE(state, 'background'), count(*), COALESCE(EXTRACT(EPOCH FROM max(now() - xact_start))::float8, 0)
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() GROUP BY 1
"""


def _database() -> dict[Metric, Values]:
    with connection.cursor() as cursor:
        cursor.execute(_ACTIVITY)
        rows = cursor.fetchall()
        cursor.execute("SHOW max_connections")
        (allowed,) = cursor.fetchone()
    return {
        metrics.DB_CONNECTIONS: {(state,): number for state, number, _ in rows},
        metrics.DB_MAX_CONNECTIONS: {(): float(allowed)},
        metrics.DB_OLDEST_TRANSACTION: {(): max((age for _, _, age in rows), default=0.0)},
        metrics.DB_POOL: _pool(),
    }


def _pool() -> Values:
    """Of this process; empty when it has none (PRORL_DB_POOL_SIZE=0)."""
    pool = getattr(connection, "pool", None)
    if pool is None:
        return {}
    stats = pool.get_stats()
    return {(name.removeprefix("pool_"),): stats[name] for name in ("pool_size", "pool_available", "requests_waiting")}
