"""100,000 rollouts submitted at once: how quickly they are stored, when the first is claimed, and what waiting costs."""

from __future__ import annotations

import sys
import time

from benchmarks.platform import MeasuredPlatform, measured_platform
from benchmarks.report import Figure, Machine, conclude, table
from rollouts.client import Client
from rollouts.client.types import GroupSpec

ROLLOUTS = 100_000
GROUP = 100
RUN_SLOTS = 16
STAGE_SECONDS = 1.0
WATCH_SECONDS = 60.0
GROWTH_TARGET_MIB = 16.0  # of the dispatcher, from an empty queue to a full one
CLAIM_TARGET_SECONDS = 2.0
_PATIENCE_SECONDS = 600.0


def main() -> int:
    machine = Machine()
    with measured_platform() as platform:
        with platform.start_trainer(model=platform.start_model(seconds=0), capacity=RUN_SLOTS, handler="staged") as client:
            platform.start_execution(concurrency=RUN_SLOTS)
            _submit(client, 1)  # warms up
            platform.wait_until_all_finished()
            idle = _cpu_for(platform, WATCH_SECONDS / 2)
            empty = platform.meter().memory()
            machine.sample()
            submitting = platform.meter()
            submitting.begin()
            submitted, seconds = _submit(client, ROLLOUTS // GROUP)
            answered = time.time()
            spent = submitting.cpu()
        platform.wait_for(lambda: _first_claim(platform, submitted) is not None, "a claim", timeout=_PATIENCE_SECONDS)
        claimed = _first_claim(platform, submitted)
        machine.sample()
        begun = platform.value("SELECT count(*) FROM rollouts_rollout WHERE finished_at IS NOT NULL")
        busy = _cpu_for(platform, WATCH_SECONDS)
        done = platform.value("SELECT count(*) FROM rollouts_rollout WHERE finished_at IS NOT NULL") - begun
        full = platform.meter().memory()
        machine.sample()
    table(
        f"{ROLLOUTS:,} queued rollouts; {done / WATCH_SECONDS:.1f} rollouts/s are carried out",
        ["program", "MiB empty", "MiB full", "CPU s to submit", "CPU ms/s empty", "CPU ms/s full"],
        [(name, empty[name], full[name], spent[name], idle[name] * 1000, busy[name] * 1000) for name in empty],
    )
    assert claimed is not None
    figures = [
        Figure("memory that the dispatcher gains", full["dispatcher"] - empty["dispatcher"], "MiB", GROWTH_TARGET_MIB),
        Figure("from the answer to the first claim", max(claimed - answered, 0.0), "s", CLAIM_TARGET_SECONDS),
        Figure("rollouts submitted in a second", ROLLOUTS / seconds, "rollouts/s"),
        Figure("CPU of web and database to submit", (spent["web"] + spent["database"]) * 1e6 / ROLLOUTS, "us/rollout"),
        Figure("CPU of the dispatcher", busy["dispatcher"] * 1000, "ms/s"),
        Figure("memory that the web server gains", full["web"] - empty["web"], "MiB"),
    ]
    return conclude("queue", figures, machine)


def _submit(client: Client, groups: int) -> tuple[str, float]:
    """Submit groups in one request; the run's id and the seconds until it was answered."""
    run = client.create_run("queue", policy="fake")["id"]
    payload = {"init": 0.0, "run": STAGE_SECONDS, "eval": 0.0}
    begun = time.monotonic()
    client.submit_groups(run, [GroupSpec(n=GROUP, environment="staged", payload=payload) for _ in range(groups)])
    return run, time.monotonic() - begun


def _first_claim(platform: MeasuredPlatform, run: str) -> float | None:
    """The moment of the first claim, in seconds since the epoch."""
    claimed = """
        SELECT extract(epoch FROM min(e.at))::float8 FROM rollouts_rollout r JOIN rollouts_rolloutevent e ON e.rollout_id = r.id
        WHERE r.run_id = %s AND r.state <> 'queued' AND e.to_state = 'initializing'
    """
    moment = platform.value(claimed, run)
    return None if moment is None else float(moment)


def _cpu_for(platform: MeasuredPlatform, seconds: float) -> dict[str, float]:
    """CPU seconds of each program for every second of the wall clock."""
    meter = platform.meter()
    begun = time.monotonic()
    meter.begin()
    time.sleep(seconds)
    return {name: spent / (time.monotonic() - begun) for name, spent in meter.cpu().items()}


if __name__ == "__main__":
    sys.exit(main())
