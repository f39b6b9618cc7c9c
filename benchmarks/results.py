"""256 rollouts of 16,000 tokens each, from the database into the trainer's NumPy arrays."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import httpx
import numpy as np

from benchmarks.platform import MeasuredPlatform, measured_platform
from benchmarks.report import Figure, Machine, conclude, table
from rollouts.client import Client, unpack

ROLLOUTS = 256
TURNS = 8
TOKENS = 16_000  # of each rollout: half of every turn is context, half sampled
ROUNDS = 7
TARGET_SECONDS = 0.5

# Rollouts that were cancelled before they began are delivered like all others; their turns are put beside them.
_FILL = """
import json, random
from rollouts.models import ModelCall, Project, Rollout
from rollouts.services import cancel, keys, registry, servers, submit
project = Project.objects.create(name="bench")
registry.create_environment(project=project, name="sums", handler="arithmetic", config={{}})
registry.get_or_create_policy(project=project, name="tiny")
run = submit.create_run(project=project, name="results", policy="tiny", settings={{}})
payload = {{"a": 1, "b": 2}}
submit.submit_groups(run=run, groups=[submit.GroupRequest(n={n}, environment="sums", payload=payload)])
cancel.cancel_rollouts(project=project, run_id=run.id)
half = {tokens} // {turns} // 2
chance = random.Random(1)
ids = [chance.randrange(150_000) for _ in range(half)]
logprobs = [-chance.random() for _ in range(half)]
for rollout in Rollout.objects.filter(run=run):
    ModelCall.objects.bulk_create(
        ModelCall(
            rollout=rollout, attempt=rollout.attempt, turn=turn, context_ids=ids, sampled_ids=ids, logprobs=logprobs,
            finish_reason="stop", prompt_tokens=(2 * turn + 1) * half, policy="tiny", policy_version=0, latency=1.0,
        )
        for turn in range({turns})
    )
print(json.dumps([str(run.id), keys.issue_key(project=project, name="bench", scopes=["read"]).secret]))
"""


def main() -> int:
    machine = Machine()
    with measured_platform(rabbitmq=False) as platform:
        run_id, key = platform.shell(_FILL.format(n=ROLLOUTS, tokens=TOKENS, turns=TURNS))
        url = platform.start_web()
        packed = _rounds(platform, machine, lambda: _by_client(url, key, run_id))
        text = _rounds(platform, machine, lambda: _as_json(url, key, run_id))
    table(
        f"{ROLLOUTS} rollouts of {TOKENS:,} tokens, medians of {ROUNDS} rounds",
        ["", "seconds", "web CPU s", "database CPU s", "client CPU s"],
        [("MessagePack, by the client", *packed), ("JSON with base64", *text)],
    )
    return conclude(
        "results",
        [
            Figure("results into NumPy arrays", packed[0], "s", TARGET_SECONDS),
            Figure("web CPU", packed[1], "s"),
            Figure("client CPU", packed[3], "s"),
            Figure("as JSON with base64", text[0], "s"),
        ],
        machine,
    )


def _rounds(platform: MeasuredPlatform, machine: Machine, fetch: Callable[[], None]) -> tuple[float, float, float, float]:
    """Wall seconds, and CPU seconds of web server, database and this process; after one round to warm up."""
    fetch()
    rounds = []
    for _ in range(ROUNDS):
        meter = platform.meter()
        meter.begin()
        begun, cpu = time.perf_counter(), time.process_time()
        fetch()
        took, used = time.perf_counter() - begun, time.process_time() - cpu
        spent = meter.cpu()
        rounds.append((took, spent["web"], spent["database"], used))
        machine.sample()
    took, web, database, client = (statistics.median(values) for values in zip(*rounds, strict=True))
    return took, web, database, client


def _by_client(url: str, key: str, run_id: str) -> None:
    with Client(url, key) as client:
        _check(
            [
                _arrays(segment)
                for row in client.iter_results(run_id, include="segments", limit=256)
                for segment in row["segments"]
            ]
        )


def _as_json(url: str, key: str, run_id: str) -> None:
    query = {"include": "segments", "limit": ROLLOUTS}
    answer = httpx.get(
        f"{url}/api/v1/runs/{run_id}/results/", params=query, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )
    _check([_arrays(segment) for row in answer.json()["results"] for segment in row["segments"]])


def _arrays(segment: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    arrays = unpack(segment)  # type: ignore[arg-type]
    return np.asarray(arrays.token_ids), np.asarray(arrays.loss_mask), np.asarray(arrays.logprobs)


def _check(segments: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    assert len(segments) == ROLLOUTS
    for token_ids, loss_mask, logprobs in segments:
        assert (token_ids.dtype, loss_mask.dtype, logprobs.dtype) == (np.int32, np.uint8, np.float32)
        assert len(token_ids) == len(loss_mask) == len(logprobs) == TOKENS
        assert loss_mask.sum() == TOKENS // 2


if __name__ == "__main__":
    sys.exit(main())
