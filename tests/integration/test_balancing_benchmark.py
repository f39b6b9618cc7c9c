"""The comparison of `make bench NAME=balancing`, small."""

from __future__ import annotations

import pytest

from benchmarks.balancing import OURS, compare
from benchmarks.simulation.servers import BLOCK, PrefixCache, Server
from benchmarks.simulation.world import Scenario


@pytest.mark.django_db
def test_every_way_ends_every_rollout_and_ours_uses_the_caches() -> None:
    scenario = Scenario(groups=5, servers=2, capacity=10, added_at=10.0, dies_at=20.0, back_at=40.0)
    outcomes = {name: found for name, [found] in compare(scenario, seeds=(1,)).items()}
    assert len({len(found.rollouts) for found in outcomes.values()}) == 1
    assert len({len(found.turns) for found in outcomes.values()}) == 1
    assert all(0 < found.utilisation <= 1 for found in outcomes.values())
    assert outcomes[OURS].prefix_hits > outcomes["round robin by call"].prefix_hits


def test_calls_slow_each_other_down() -> None:
    server = Server(0, capacity=8)
    server.begin(0.0, 1, [], output=1000)
    alone = server.next_end()
    server.begin(0.0, 2, [], output=1000)
    together = server.next_end()
    assert alone is not None and together is not None
    assert alone[0] < together[0] < 2 * alone[0]


def test_what_is_in_the_cache_costs_nothing() -> None:
    server = Server(0, capacity=8)
    prompt = [("group", 1, n) for n in range(100)]
    server.begin(0.0, 1, prompt, output=10)
    cold = server.next_end()
    assert cold is not None
    server.end(cold[0])
    server.begin(cold[0], 2, prompt, output=10)
    warm = server.next_end()
    assert warm is not None and warm[0] - cold[0] < cold[0] / 10
    assert (server.found_blocks, server.prompt_blocks) == (100, 200)
    assert BLOCK * 100 == 6400


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    cache = PrefixCache(size=4)
    assert cache.use(["a", "b"]) == 0
    assert cache.use(["c", "d"]) == 0
    assert cache.use(["a", "b"]) == 2
    assert cache.use(["e"]) == 0  # "d" goes: the end of the oldest prompt
    assert cache.use(["c", "d"]) == 1
    assert cache.use(["a"]) == 1
