"""Every metric of `/metrics` on one page: the contract with dashboards and alerts (docs/reference/metrics.md). No Django here.

Gauges are read from the tables when someone asks. Counters and histograms are kept in the database (`services/metering.py`), so
that they are those of the whole fleet whichever web process answers, and go on after any restart.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """Prometheus's types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """`bounds` are the upper bounds of a histogram's buckets, in the metric's unit; +Inf comes on its own."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    bounds: tuple[float, ...] = ()


_SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)


CATALOGUE: list[Metric] = []


def _metric(kind: Kind, name: str, labels: tuple[str, ...], meaning: str, bounds: tuple[float, ...] = ()) -> Metric:
    CATALOGUE.append(Metric(name, kind, labels, meaning, bounds))
    return CATALOGUE[-1]


def _counter(name: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return _metric(Kind.COUNTER, name, labels, meaning)


def _gauge(name: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return _metric(Kind.GAUGE, name, labels, meaning)


def _histogram(name: str, labels: tuple[str, ...], meaning: str, bounds: tuple[float, ...]) -> Metric:
    return _metric(Kind.HISTOGRAM, name, labels, meaning, bounds)


# --- Now ---------------------------------------------------------------------------------------------------------------------
ROLLOUTS = _gauge("prorl_rollouts", ("project", "state"), "Rollouts that have not ended, by state.")
QUEUE_DEPTH = _gauge("prorl_queue_depth", ("stage",), "Rollouts that wait for a worker of a stage.")
QUEUE_HINTED = _gauge("prorl_queue_hinted", ("stage",), "Those of them whose hint is published and not yet taken.")
QUEUE_OLDEST = _gauge("prorl_queue_oldest_seconds", ("stage",), "How long the first of them has waited; 0 when none waits.")
WORKER_PROCESSES = _gauge(
    "prorl_worker_processes",
    ("node", "stage"),
    "Worker processes that renew their lease; the `stage` of gateway processes is `gateway`.",
)
WORKER_SLOTS = _gauge("prorl_worker_slots", ("node", "stage"), "Rollouts they may work on at once.")
WORKER_HELD = _gauge("prorl_worker_held", ("node", "stage"), "Rollouts they work on.")
SERVER_UP = _gauge(
    "prorl_llm_server_up", ("project", "policy", "server"), "1 when the LLM server may be given rollouts, else 0."
)
SERVER_IN_FLIGHT = _gauge("prorl_llm_server_in_flight", ("project", "policy", "server"), "Running rollouts that use it.")
SERVER_CAPACITY = _gauge("prorl_llm_server_capacity", ("project", "policy", "server"), "Rollouts it takes at once.")
SERVER_LOAD = _gauge(
    "prorl_llm_server_load",
    ("project", "policy", "server", "figure"),
    "What it said of itself at its last probe: requests `running` and `waiting`, shares `kv_cache` and `prefix_hits`, "
    "`tokens_per_second`.",
)
FEED_BEHIND = _gauge(
    "prorl_feed_behind",
    ("consumer",),
    "Finished rollouts a consumer has still to deal with (`metering`: the counters below).",
)
WEBHOOKS_PENDING = _gauge("prorl_webhook_deliveries_pending", (), "Webhook messages that are still to be delivered.")
WEBHOOKS_OLDEST = _gauge("prorl_webhook_oldest_pending_seconds", (), "Age of the first of them; 0 when there is none.")
SANDBOXES = _gauge(
    "prorl_sandboxes",
    ("node", "state"),
    "Sandboxes that are not proven stopped: `starting`, `ready`, or `leftover` when stopping them failed.",
)
BLOBS = _gauge("prorl_blobs", (), "Blobs: large tool outputs and artefacts.")
BLOB_BYTES = _gauge("prorl_blob_stored_bytes", (), "What they take in the storage, compressed.")
DISPATCHER_AGE = _gauge("prorl_dispatcher_last_pass_seconds", (), "Since the dispatcher last got through its rescue step.")
DB_CONNECTIONS = _gauge("prorl_database_connections", ("state",), "Connections to this database, by state.")
DB_MAX_CONNECTIONS = _gauge("prorl_database_max_connections", (), "How many the database server allows in total.")
DB_OLDEST_TRANSACTION = _gauge(
    "prorl_database_oldest_transaction_seconds",
    (),
    "Age of the oldest open transaction: it holds back delivery of results.",
)
DB_POOL = _gauge(
    "prorl_database_pool", ("what",), "Connection pool of the web process that answered: size, available, waiting requests."
)

# --- Since the beginning: counted when a rollout ends, over all its attempts --------------------------------------------------
FINISHED = _counter(
    "prorl_rollouts_finished_total", ("project", "state", "phase", "cause", "blame"), "Rollouts that ended, and why."
)
GIVEN_UP = _counter(
    "prorl_attempts_given_up_total",
    ("stage", "cause"),
    "Attempts, or evaluations, that were repeated; `handed_back` when a worker stopped in good order.",
)
STUCK = _counter("prorl_rollouts_stuck_total", ("stage",), "Times a rollout was past its deadline while its worker was alive.")
WORKERS_LOST = _counter("prorl_worker_processes_lost_total", ("stage",), "Leases that expired. Counted at once.")
QUEUE_SECONDS = _histogram(
    "prorl_queue_wait_seconds", (), "Waiting for workers, over all stages of a rollout's last attempt.", _LONG
)
STAGE_SECONDS = _histogram("prorl_stage_seconds", ("stage",), "Time in a stage, of a rollout's last attempt.", _LONG)
MODEL_SECONDS = _histogram(
    "prorl_model_call_seconds", ("project", "policy"), "One model call, retries included.", (*_SHORT, 120.0, 300.0)
)
MODEL_TOKENS = _counter(
    "prorl_model_tokens_total", ("project", "policy", "kind"), "Tokens of model calls: `prompt` as sent, `sampled`."
)
TOOL_SECONDS = _histogram("prorl_tool_call_seconds", (), "One tool call.", _SHORT)
SANDBOX_STARTS = _counter("prorl_sandbox_starts_total", ("backend", "outcome"), "Sandbox starts: `ready` or `failed`.")
SANDBOX_SECONDS = _histogram(
    "prorl_sandbox_start_seconds", ("backend",), "From the order to start a sandbox until its broker answered.", _SHORT
)
TEARDOWN_FAILURES = _counter(
    "prorl_sandbox_teardown_failures_total",
    ("backend",),
    "Times that something of a sandbox survived its stop. Counted at once; each is tried again.",
)
SANDBOXES_ABANDONED = _counter(
    "prorl_sandboxes_abandoned_total", (), "Sandboxes given up without proof, because their node never came back."
)
