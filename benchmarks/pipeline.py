"""Three stages of long-tailed length: the throughput beside what the slowest stage allows, and beside one pool for all."""

from __future__ import annotations

import math
import random
import statistics
import sys
from typing import NamedTuple

from benchmarks.platform import MeasuredPlatform, measured_platform
from benchmarks.report import Figure, Machine, conclude, table
from rollouts.client import Client
from rollouts.client.types import GroupSpec

ROLLOUTS = 600
GROUP = 8
ROUNDS = 3
TARGET = 0.95
SLOTS = {"init": 24, "run": 48, "eval": 24}
# Of lognormal times, in seconds: the mean, and how long the tail is (1: one in twenty takes more than three times the mean).
MEANS = {"init": 1.2, "run": 4.0, "eval": 1.2}
SIGMA = 1.0
SKIPPED = 0.15  # of the rollouts at each end, where the pipeline fills and drains

# Between the moments when two shares of the rollouts had finished: how many finished, and the seconds of RUN's real work in it.
# Of a rollout's time in RUN the part in the window counts, less what of that was not the work itself.
_WINDOW = """
WITH bounds AS (
    SELECT percentile_disc(ARRAY[%s, %s]) WITHIN GROUP (ORDER BY finished_at) AS b FROM rollouts_rollout WHERE run_id = %s
), span AS (SELECT b[1] AS first, b[2] AS last FROM bounds)
SELECT extract(epoch FROM last - first)::float8 AS seconds,
       count(*) FILTER (WHERE finished_at > first AND finished_at <= last) AS n,
       sum(greatest(extract(epoch FROM least(ran.at, last) - greatest(began.at, first)), 0)
           / extract(epoch FROM ran.at - began.at) * (payload->>'run')::float8)::float8 AS run
FROM span, rollouts_rollout r JOIN rollouts_task task ON task.id = task_id
JOIN rollouts_rolloutevent began ON began.rollout_id = r.id AND began.to_state = 'running'
JOIN rollouts_rolloutevent ran ON ran.rollout_id = r.id AND ran.from_state = 'running'
WHERE run_id = %s GROUP BY first, last
"""


class Round(NamedTuple):
    """The throughput in rollouts a second, and the share of the RUN slots' time in which a rollout's RUN went on."""

    rate: float
    of_bound: float


def main() -> int:
    machine = Machine()
    with measured_platform() as platform:
        model = platform.start_model(seconds=0)
        with platform.start_trainer(model=model, capacity=SLOTS["run"], handler="staged") as client:
            platform.spawn("dispatcher", "django", "dispatch")
            for stage, slots in SLOTS.items():
                platform.start_worker(stage, slots)
            _round(platform, client, _times(0)[: 10 * GROUP])  # warms up
            staged = []
            for number in range(ROUNDS):
                staged.append(_round(platform, client, _times(number)))
                machine.sample()
            times = _times(0)
            merged = _round(platform, client, [_in_one_stage(t) for t in times], useful=sum(t["run"] for t in times))
    rows = [("pools for the stages", *result) for result in staged]
    rows.append(("one pool, which keeps a RUN slot throughout", *merged))
    table("rounds", ["", "rollouts/s", "of the bound"], rows)
    figures = [
        Figure("throughput over its bound", statistics.median(r.of_bound for r in staged), "", TARGET, at_least=True),
        Figure("with one pool for all stages", merged.of_bound, ""),
        Figure("throughput", statistics.median(r.rate for r in staged), "rollouts/s"),
        Figure("throughput with one pool", merged.rate, "rollouts/s"),
    ]
    return conclude("pipeline", figures, machine)


def _times(seed: int) -> list[dict[str, float]]:
    chance = random.Random(seed)
    shift = SIGMA * SIGMA / 2  # a lognormal's mean is this far, as a power of e, above its median
    return [
        {stage: chance.lognormvariate(math.log(mean) - shift, SIGMA) for stage, mean in MEANS.items()} for _ in range(ROLLOUTS)
    ]


def _in_one_stage(times: dict[str, float]) -> dict[str, float]:
    return {"init": 0.0, "run": sum(times.values()), "eval": 0.0}


def _round(platform: MeasuredPlatform, client: Client, times: list[dict[str, float]], useful: float | None = None) -> Round:
    """`useful`: seconds of real RUN among the rollouts' times, when their RUN holds the other stages, too."""
    run = client.create_run("pipeline", policy="fake")["id"]
    client.submit_groups(run, [GroupSpec(n=1, environment="staged", payload=t) for t in times])
    assert sum(1 for _ in client.iter_results(run)) == len(times)
    [window] = platform.rows(_WINDOW, SKIPPED, 1 - SKIPPED, run, run)
    share = 1.0 if useful is None else useful / sum(t["run"] for t in times)
    return Round(window["n"] / window["seconds"], share * window["run"] / (SLOTS["run"] * window["seconds"]))


if __name__ == "__main__":
    sys.exit(main())
