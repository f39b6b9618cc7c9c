"""1,000 rollouts that wait for a slow model in one worker process: its memory, and what it costs to keep them."""

from __future__ import annotations

import json
import statistics
import sys
import time

from benchmarks.platform import MeasuredPlatform, measured_platform
from benchmarks.report import Figure, Machine, conclude, say, table
from tests.acceptance.platform import submit

ROLLOUTS = 1000
MODEL_SECONDS = 3600
ROUNDS = 3
ROUND_SECONDS = 20.0
MIB_TARGET = 150.0
_PATIENCE_SECONDS = 300.0


def main() -> int:
    machine = Machine()
    with measured_platform(ready_buffer=ROLLOUTS) as platform:
        _start(platform)
        idle = platform.meter().memory()
        begun = time.monotonic()
        platform.wait_for(lambda: _waiting(platform) == ROLLOUTS, "all to wait for the model", timeout=_PATIENCE_SECONDS)
        say(f"{ROLLOUTS} rollouts wait after {time.monotonic() - begun:.1f} s")
        rounds = [_round(platform, machine) for _ in range(ROUNDS)]
        memory = platform.meter().memory()
        still = _waiting(platform)
    cpu = {name: statistics.median(spent[name] for spent in rounds) for name in rounds[0]}
    table(
        f"{ROLLOUTS} waiting rollouts",
        ["program", "MiB before", "MiB waiting", "CPU ms/s"],
        [(name, idle[name], memory[name], cpu[name] * 1000) for name in memory],
    )
    figures = [
        Figure("memory of the run worker", memory["run"], "MiB", MIB_TARGET),
        Figure("per waiting rollout", (memory["run"] - idle["run"]) * 1024 / ROLLOUTS, "KiB"),
        Figure("CPU of the run worker", cpu["run"] * 1000, "ms/s"),
        Figure("CPU of the database", cpu["database"] * 1000, "ms/s"),
        Figure("rollouts that still wait at the end", still, "", ROLLOUTS, at_least=True),
    ]
    return conclude("waiting", figures, machine)


def _start(platform: MeasuredPlatform) -> None:
    """The model answers within the hour, so every rollout that got to it waits."""
    model = platform.spawn("model", "rollouts.llm.scripted", "--delay", str(MODEL_SECONDS))
    log = platform.folder / "log" / "model.log"
    platform.wait_for(lambda: log.read_text().strip() or model.poll() is not None, "the model server")
    url = json.loads(log.read_text())["url"]
    platform.start_execution(concurrency=ROLLOUTS)
    groups = [{"n": 8, "environment": "sums", "payload": {"a": number, "b": 1}} for number in range(ROLLOUTS // 8)]
    submit(platform, url, groups, {"timeouts": {"agent": MODEL_SECONDS, "model_call": MODEL_SECONDS}})
    platform.rows("UPDATE rollouts_llmserver SET capacity = %s RETURNING id", ROLLOUTS)


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
