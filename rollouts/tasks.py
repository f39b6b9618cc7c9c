"""The Celery jobs. Those of rollouts take a list of ids and nothing else: the rest is read from Postgres by the claim."""

from __future__ import annotations

from prorl_site.celery import app
from rollouts.worker import celery_worker, maintenance


@app.task(name="rollouts.init")
def initialize(rollout_ids: list[str]) -> None:
    celery_worker.take(rollout_ids)


@app.task(name="rollouts.run")
def run(rollout_ids: list[str]) -> None:
    celery_worker.take(rollout_ids)


@app.task(name="rollouts.eval")
def evaluate(rollout_ids: list[str]) -> None:
    celery_worker.take(rollout_ids)


@app.task(name="rollouts.maintain")
def maintain() -> None:
    maintenance.wake()
