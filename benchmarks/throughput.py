"""1,000 rollouts of 5 turns each on a model that takes 50 ms: rollouts a second, and what the platform spends on one."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter

from benchmarks.platform import MeasuredPlatform, measured_platform
from benchmarks.report import Figure, Machine, conclude, say, table
from rollouts.client import Client
from rollouts.client.types import GroupSpec

ROLLOUTS = 1000
TURNS = 5
MODEL_SECONDS = 0.05
IN_FLIGHT = 256
ROUNDS = 3
GROUP = 8
CPU_TARGET_MS = 15.0
RATE_TARGET = 80.0
_NOT_OURS = ("model",)


def main() -> int:
    machine = Machine()
    with measured_platform(ready_buffer=IN_FLIGHT // 4) as platform:
        model = platform.start_model(seconds=MODEL_SECONDS, turns=TURNS)
        with platform.start_trainer(model=model, capacity=IN_FLIGHT) as client:
            platform.start_execution(concurrency=IN_FLIGHT)
            _round(platform, client, 50)  # warms up: imports, connections, prepared statements
            rounds = []
            for _ in range(ROUNDS):
                rounds.append(_round(platform, client, ROLLOUTS))
                machine.sample()
            memory = platform.meter().memory()
            with platform.statements() as statements:
                _round(platform, client, ROLLOUTS)
    return _report(rounds, memory, statements, machine)


class Round:
    """What one round took: seconds of the wall clock, CPU milliseconds of each program for one rollout."""

    def __init__(self, rollouts: int, seconds: float, cpu: dict[str, float]) -> None:
        self.rate = rollouts / seconds
        self.cpu_ms = {name: spent * 1000 / rollouts for name, spent in cpu.items()}

    @property
    def platform_ms(self) -> float:
        return sum(spent for name, spent in self.cpu_ms.items() if name not in _NOT_OURS)


def _round(platform: MeasuredPlatform, client: Client, rollouts: int) -> Round:
    """Submit through the API, and take the results as they come, as a trainer does."""
    meter = platform.meter()
    run = client.create_run("throughput", policy="fake")
    groups = [
        GroupSpec(n=GROUP, environment="turns", payload={"question": f"Take five steps for problem {number}."})
        for number in range(rollouts // GROUP)
    ]
    meter.begin()
    begun = time.monotonic()
    client.submit_groups(run["id"], groups)
    results = list(client.iter_results(run["id"], include="segments"))
    seconds = time.monotonic() - begun
    spent = meter.cpu()
    outcome = Counter((result["state"], result["turns"]) for result in results)
    assert outcome == {("succeeded", TURNS): rollouts // GROUP * GROUP}, outcome
    say(f"{len(results)} rollouts in {seconds:.1f} s")
    return Round(len(results), seconds, spent)


def _report(rounds: list[Round], memory: dict[str, float], statements: Counter[str], machine: Machine) -> int:
    cpu = {name: statistics.median(r.cpu_ms[name] for r in rounds) for name in rounds[0].cpu_ms}
    table(
        "by program",
        ["program", "CPU ms per rollout", "MiB"],
        [(name, cpu[name], memory[name]) for name in sorted(cpu, key=lambda name: -cpu[name])],
    )
    per_rollout = {shape: count / ROLLOUTS for shape, count in statements.most_common(25)}
    table("statements for one rollout, the most frequent", ["statement", "times"], list(per_rollout.items()))
    figures = [
        Figure("CPU of the platform for one rollout", statistics.median(r.platform_ms for r in rounds), "ms", CPU_TARGET_MS),
        Figure("throughput", statistics.median(r.rate for r in rounds), "rollouts/s", RATE_TARGET, at_least=True),
        Figure("statements for one rollout", statements.total() / ROLLOUTS, ""),
        Figure("memory of all programs", sum(size for name, size in memory.items() if name not in _NOT_OURS), "MiB"),
    ]
    return conclude("throughput", figures, machine)


if __name__ == "__main__":
    sys.exit(main())
