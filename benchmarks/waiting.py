"""1,000 rollouts that wait for a slow model in one worker process: its memory, and what it costs to keep them."""

from __future__ import annotations

import statistics
import sys
import time

from benchmarks.platform import MeasuredPlatform, measured_platform
from benchmarks.report import Figure, Machine, conclude, say, table
from rollouts.client import Client
from rollouts.client.types import GroupSpec

ROLLOUTS = 1000
GROUP = 8
MODEL_SECONDS = 3600
ROUNDS = 5
ROUND_SECONDS = 10.0
MIB_TARGET = 150.0
_PATIENCE_SECONDS = 300.0


def main() -> int:
    machine = Machine()
    with measured_platform(ready_buffer=64) as platform:
        # The server is registered with a quick model, since that asks it something, and then answered for by a slow one.
        slow = platform.start_model(seconds=MODEL_SECONDS, name="slow model")
        with platform.start_trainer(model=platform.start_model(seconds=0), capacity=ROLLOUTS) as client:
            platform.rows("UPDATE rollouts_llmserver SET url = %s RETURNING id", slow)
            platform.start_execution(concurrency=ROLLOUTS)
            idle = platform.meter().memory()
            _submit(client)
        begun = time.monotonic()
        platform.wait_for(lambda: _waiting(platform) == ROLLOUTS, "all to wait for the model", timeout=_PATIENCE_SECONDS)
        say(f"{ROLLOUTS} rollouts wait after {time.monotonic() - begun:.1f} s")
        rounds = [_round(platform, machine) for _ in range(ROUNDS)]
        memory = platform.meter().memory()
        resident = platform.meter().resident("run")
        still = _waiting(platform)
    cpu = {name: statistics.median(spent[name] for spent in rounds) * 1000 for name in rounds[0]}
    table(
        f"{ROLLOUTS} waiting rollouts",
        ["program", "MiB before", "MiB waiting", "CPU ms/s"],
        [(name, idle[name], memory[name], cpu[name]) for name in idle],
    )
    figures = [
        Figure("resident memory of the run worker", resident, "MiB", MIB_TARGET),
        Figure("for each waiting rollout", (memory["run"] - idle["run"]) * 1024 / ROLLOUTS, "KiB"),
        Figure("CPU of the run worker", cpu["run"], "ms/s"),
        Figure("CPU of the database", cpu["database"], "ms/s"),
        Figure("rollouts that still wait at the end", still, "", ROLLOUTS, at_least=True),
    ]
    return conclude("waiting", figures, machine)


def _submit(client: Client) -> None:
    timeouts = {"agent": MODEL_SECONDS, "model_call": MODEL_SECONDS}
    run = client.create_run("waiting", policy="fake", settings={"timeouts": timeouts})
    groups = [GroupSpec(n=GROUP, environment="turns", payload={"question": f"{n}?"}) for n in range(ROLLOUTS // GROUP)]
    client.submit_groups(run["id"], groups)


def _waiting(platform: MeasuredPlatform) -> int:
    return int(platform.value("SELECT count(*) FROM rollouts_rollout WHERE state = 'running'"))


def _round(platform: MeasuredPlatform, machine: Machine) -> dict[str, float]:
    """CPU seconds of each program for every second of waiting."""
    meter = platform.meter()
    begun = time.monotonic()
    meter.begin()
    time.sleep(ROUND_SECONDS)
    spent = {name: seconds / (time.monotonic() - begun) for name, seconds in meter.cpu().items()}
    machine.sample()
    return spent


if __name__ == "__main__":
    sys.exit(main())
