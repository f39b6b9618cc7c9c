"""What vLLM's /metrics say of its load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# Ours for vLLM's. Of those that count up, only the change between two looks says something.
_GAUGES = {"vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting"}
_SHARES = {"vllm:kv_cache_usage_perc": "kv_cache"}
_COUNTERS = {
    "vllm:generation_tokens_total": "tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
}

SHOWN = ("running", "waiting", "kv_cache", "prefix_hits", "tokens_per_second")  # the rest is for the next look


def read_load(text: str, *, at: float, before: Mapping[str, Any]) -> dict[str, Any]:
    """The load at the moment `at` (seconds of any clock), given what this returned the last time.

    running and waiting count requests; kv_cache and prefix_hits are shares from 0 to 1; prefix_hits (of the prompt tokens) and
    tokens_per_second are of the time since `before`. What is not told is left out. Raises ValueError when `text` is no metrics.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if name := _GAUGES.get(sample.name) or _SHARES.get(sample.name) or _COUNTERS.get(sample.name):
                values[name].append(sample.value)
    # One value for each engine of a data-parallel server.
    load: dict[str, Any] = {name: sum(values[name]) for name in _GAUGES.values() if name in values}
    load |= {name: sum(values[name]) / len(values[name]) for name in _SHARES.values() if name in values}
    counted = {name: sum(values[name]) for name in _COUNTERS.values() if name in values}
    last = before.get("counted", {})
    grown = {name: counted[name] - last[name] for name in counted.keys() & last.keys()}
    seconds = at - before.get("at", at)
    if grown.get("tokens", -1) >= 0 and seconds > 0:  # less than before: it was restarted
        load["tokens_per_second"] = round(grown["tokens"] / seconds, 1)
    if grown.get("prefix_queries", 0) > 0 and grown.get("prefix_hits", -1) >= 0:
        load["prefix_hits"] = round(grown["prefix_hits"] / grown["prefix_queries"], 4)
    return load | {"at": at, "counted": counted}
