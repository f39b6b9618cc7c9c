"""Sharing rollouts among model servers, in virtual time: ours (the real statement, a real database) beside three other ways.

Few rollouts are much longer than most, groups share their prompts, tools make pauses; a server is added, another dies and comes
back.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.platform import scratch_folder
from benchmarks.report import Figure, Machine, conclude, say, table
from prorl_site.embedded.postgres import EmbeddedPostgres

if TYPE_CHECKING:
    from benchmarks.simulation.world import Outcome, Scenario

SEEDS = (1, 2, 3, 4, 5)
OURS = "ours"


def main() -> int:
    machine = Machine()
    with scratch_folder() as folder, EmbeddedPostgres(folder / "postgres", durable=False) as postgres:
        os.environ |= {
            "PRORL_DATABASE_URL": postgres.url,
            "DJANGO_SETTINGS_MODULE": "prorl_site.settings",
            "PRORL_SECRET_KEY": "benchmark",
            "PRORL_DB_POOL_SIZE": "0",
        }
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        from benchmarks.simulation.world import Scenario

        outcomes = compare(Scenario(), SEEDS)
        machine.sample()
    return _report(outcomes, machine)


def compare(scenario: Scenario, seeds: Sequence[int]) -> dict[str, list[Outcome]]:
    """Each way with the same rollouts, once for each seed. Needs the database of the settings."""
    from benchmarks.simulation import balancers
    from benchmarks.simulation.world import Balancer, World

    ways: dict[str, Callable[[int], Balancer]] = {
        OURS: balancers.Ours,
        "round robin by call": lambda _: balancers.RoundRobin(),
        "cumulative counter": lambda _: balancers.CumulativeCounter(),
        "static split": lambda _: balancers.StaticSplit(),
    }
    outcomes: dict[str, list[Outcome]] = {}
    for name, balancer in ways.items():
        outcomes[name] = [World(scenario, seed, balancer(seed)).run() for seed in seeds]
        say(f"{name}: {len(seeds)} simulations of {len(outcomes[name][0].rollouts)} rollouts or so")
    return outcomes


_LATENCIES: dict[str, Callable[[Outcome], float]] = {
    "turn p50": lambda o: o.turn(50),
    "turn p95": lambda o: o.turn(95),
    "turn p99": lambda o: o.turn(99),
    "rollout p50": lambda o: o.rollout(50),
    "rollout p95": lambda o: o.rollout(95),
    "rollout p99": lambda o: o.rollout(99),
}
_FLEET: dict[str, Callable[[Outcome], float]] = {
    "makespan, s": lambda o: o.makespan,
    "utilisation": lambda o: o.utilisation,
    "prefix hits": lambda o: o.prefix_hits,
}


def median_of(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float]) -> float:
    return statistics.median(figure(outcome) for outcome in outcomes)


def _report(outcomes: dict[str, list[Outcome]], machine: Machine) -> int:
    for title, columns in (("latency, s", _LATENCIES), ("the fleet", _FLEET)):
        rows = [(name, *(median_of(found, column) for column in columns.values())) for name, found in outcomes.items()]
        table(f"{title}: medians over {len(SEEDS)} seeds", ["way", *columns], rows)
    ours = outcomes.pop(OURS)

    def ahead(figure: Callable[[Outcome], float]) -> float:
        """How many times as long the best of the others takes."""
        return _best(outcomes, figure, min) / median_of(ours, figure)

    hits = median_of(ours, lambda o: o.prefix_hits) - _best(outcomes, lambda o: o.prefix_hits, max)
    figures = [
        Figure("turn p99 of the best other way / ours", ahead(lambda o: o.turn(99)), "x", 1.0, True),
        Figure("rollout p99 of the best other way / ours", ahead(lambda o: o.rollout(99)), "x", 1.0, True),
        Figure("makespan of the best other way / ours", ahead(lambda o: o.makespan), "x"),
        Figure("prefix hits beyond the best other way", hits, "", 0.0, True),
    ]
    return conclude("balancing", figures, machine)


def _best(
    outcomes: dict[str, list[Outcome]], figure: Callable[[Outcome], float], best: Callable[[Sequence[float]], float]
) -> float:
    return best([median_of(found, figure) for found in outcomes.values()])


if __name__ == "__main__":
    sys.exit(main())
