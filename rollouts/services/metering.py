"""Keeps the counters and histograms of `rollouts.metrics`: what finished rollouts add to them, once for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from uuid import UUID

from django.db import connection

from rollouts import metrics
from rollouts.metrics import Metric
from rollouts.models import MetricSeries

from . import feed

CONSUMER = "metering"

_INSERT = "INSERT INTO rollouts_metricseries (name, labels, part, value)"
_ADD = "ON CONFLICT (name, labels, part) DO UPDATE SET value = rollouts_metricseries.value + excluded.value"


def count(metric: Metric, labels: Mapping[str, str], amount: int = 1) -> None:
    """Add to a counter at once, in the caller's transaction: for what is rare and not a rollout's."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_INSERT} VALUES (%s, %s::jsonb, '', %s) {_ADD}", [metric.name, json.dumps(dict(labels)), amount])


def meter() -> None:
    """Count what has finished since the last time. All of it is read from the record, so workers pay nothing for it."""
    while feed.advance(CONSUMER, _add) == feed.BATCH:
        pass


def _add(ids: list[UUID]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_STATEMENT, {"ids": ids})


# --- The statement; all that is put into it are names and bounds of `rollouts.metrics` ----------------------------------------


def _labels(metric: Metric) -> str:
    """SQL for the labels, each a column of the same name."""
    pairs = ", ".join(f"'{label}', {label}" for label in metric.labels)
    return f"jsonb_build_object({pairs}) AS labels"


def _counted(metric: Metric, source: str, amount: str = "count(*)", part: str = "") -> str:
    groups = ", ".join(metric.labels) or "()"
    selection = f"SELECT '{metric.name}', {_labels(metric)}, '{part}', {amount}::float8 FROM {source}"  # noqa: S608
    return f"{selection} GROUP BY {groups} HAVING count(*) > 0"


def _observed(metric: Metric, source: str) -> str:
    """`source` has a column `seconds`. width_bucket counts bounds from below; negated, it counts those that are not smaller."""
    rising = ", ".join(str(bound) for bound in metric.bounds)
    negated = ", ".join(str(-bound) for bound in reversed(metric.bounds))
    place = f"{len(metric.bounds)} + 1 - width_bucket(-seconds, ARRAY[{negated}]::float8[])"
    bucket = f"COALESCE((ARRAY[{rising}]::float8[])[{place}]::text, '+Inf') AS bucket"
    groups = ", ".join([*metric.labels, "bucket"])
    counts = f"SELECT '{metric.name}', {_labels(metric)}, {bucket}, count(*)::float8 FROM {source} GROUP BY {groups}"  # noqa: S608
    return f"{counts} UNION ALL {_counted(metric, source, 'sum(seconds)', MetricSeries.SUM)}"


_SOURCES = """
WITH done AS MATERIALIZED (
    SELECT r.id, project.name AS project, policy.name AS policy, r.state, r.termination_phase AS phase,
        r.termination_cause AS cause, r.termination_blame AS blame,
        r.queue_seconds, r.init_seconds, r.run_seconds, r.eval_seconds
    FROM rollouts_rollout r
    JOIN rollouts_project project ON project.id = r.project_id
    JOIN rollouts_run run ON run.id = r.run_id
    JOIN rollouts_policy policy ON policy.id = run.policy_id
    WHERE r.id = ANY(%(ids)s)
), stages AS (
    SELECT stage, seconds FROM done,
    LATERAL (VALUES ('init', init_seconds), ('run', run_seconds), ('eval', eval_seconds)) AS spent (stage, seconds)
    WHERE seconds > 0
), setbacks AS MATERIALIZED (
    SELECT event.kind, COALESCE(event.data->>'cause', 'handed_back') AS cause, COALESCE(event.data->>'stage',
        CASE event.from_state WHEN 'initializing' THEN 'init' WHEN 'running' THEN 'run' ELSE 'eval' END) AS stage
    FROM rollouts_rolloutevent event
    WHERE event.rollout_id = ANY(%(ids)s) AND event.kind IN ('requeued', 'released', 'stuck')
), calls AS MATERIALIZED (
    SELECT done.project, done.policy, call.latency AS seconds, call.prompt_tokens,
        octet_length(call.sampled_ids) / 4 AS sampled_tokens
    FROM rollouts_modelcall call JOIN done ON done.id = call.rollout_id
), tools AS MATERIALIZED (
    SELECT duration AS seconds FROM rollouts_toolcall WHERE rollout_id = ANY(%(ids)s)
), boxes AS MATERIALIZED (
    SELECT backend, CASE WHEN ready_at IS NULL THEN 'failed' ELSE 'ready' END AS outcome,
        EXTRACT(EPOCH FROM ready_at - created_at)::float8 AS seconds
    FROM sandboxes_sandbox WHERE rollout_id = ANY(%(ids)s)
)
"""

_PARTS = [
    _counted(metrics.FINISHED, "done"),
    _counted(metrics.GIVEN_UP, "setbacks WHERE kind <> 'stuck'"),
    _counted(metrics.STUCK, "setbacks WHERE kind = 'stuck'"),
    _observed(metrics.QUEUE_SECONDS, "(SELECT queue_seconds AS seconds FROM done) waits"),
    _observed(metrics.STAGE_SECONDS, "stages"),
    _observed(metrics.MODEL_SECONDS, "calls"),
    _counted(metrics.MODEL_TOKENS, "(SELECT *, 'prompt' AS kind FROM calls) sent", "sum(prompt_tokens)"),
    _counted(metrics.MODEL_TOKENS, "(SELECT *, 'sampled' AS kind FROM calls) got", "sum(sampled_tokens)"),
    _observed(metrics.TOOL_SECONDS, "tools"),
    _counted(metrics.SANDBOX_STARTS, "boxes"),
    _observed(metrics.SANDBOX_SECONDS, "boxes WHERE seconds IS NOT NULL"),
]
_STATEMENT = f"{_SOURCES} {_INSERT} {' UNION ALL '.join(_PARTS)} {_ADD}"
