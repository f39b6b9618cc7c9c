"""The load of a model server, from two looks at its metrics."""

from __future__ import annotations

import pytest

from rollouts.llm.server_metrics import read_load


def metrics(*, running: float = 3, waiting: float = 1, tokens: float = 0, queries: float = 0, hits: float = 0) -> str:
    """As vLLM 0.32 writes them, with two engines of which the second is idle."""
    values = {
        "num_requests_running": ("gauge", running),
        "num_requests_waiting": ("gauge", waiting),
        "kv_cache_usage_perc": ("gauge", 0.5),
        "generation_tokens_total": ("counter", tokens),
        "prefix_cache_queries_total": ("counter", queries),
        "prefix_cache_hits_total": ("counter", hits),
    }
    return "".join(
        f"# HELP vllm:{name} …\n# TYPE vllm:{name} {kind}\n"
        f'vllm:{name}{{engine="0",model_name="m"}} {value}\nvllm:{name}{{engine="1",model_name="m"}} 0.0\n'
        for name, (kind, value) in values.items()
    )


def test_the_first_look_tells_what_is_now() -> None:
    load = read_load(metrics(), at=100.0, before={})
    assert {name: load[name] for name in ("running", "waiting", "kv_cache")} == {"running": 3, "waiting": 1, "kv_cache": 0.25}
    assert not {"tokens_per_second", "prefix_hits"} & load.keys()


def test_the_second_look_tells_what_happened_between() -> None:
    before = read_load(metrics(tokens=1000, queries=100, hits=10), at=100.0, before={})
    load = read_load(metrics(tokens=1500, queries=300, hits=160), at=105.0, before=before)
    assert (load["tokens_per_second"], load["prefix_hits"]) == (100.0, 0.75)


def test_a_server_that_was_restarted_begins_anew() -> None:
    before = read_load(metrics(tokens=1000, queries=100, hits=10), at=100.0, before={})
    assert not {"tokens_per_second", "prefix_hits"} & read_load(metrics(tokens=5), at=105.0, before=before).keys()


def test_without_prompts_there_is_no_share_of_hits() -> None:
    before = read_load(metrics(queries=100, hits=10), at=100.0, before={})
    assert "prefix_hits" not in read_load(metrics(queries=100, hits=10), at=105.0, before=before)


def test_other_metrics_say_nothing() -> None:
    assert read_load("# TYPE other gauge\nother 1\n", at=1.0, before={}) == {"at": 1.0, "counted": {}}


def test_what_is_no_metrics_is_refused() -> None:
    with pytest.raises(ValueError):
        read_load("<html>no metrics here</html>", at=1.0, before={})
