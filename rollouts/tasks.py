"""The Celery jobs. Their only argument is a list of rollouts' ids; everything else is read from Postgres by the claim."""

from __future__ import annotations

from prorl_site.celery import app
from rollouts.worker import celery_worker


@app.task(name="rollouts.init")
def initialize(rollout_ids: list[str]) -> None:
    celery_worker.take(rollout_ids)


@app.task(name="rollouts.run")
def run(rollout_ids: list[str]) -> None:
    celery_worker.take(rollout_ids)


@app.task(name="rollouts.eval")
def evaluate(rollout_ids: list[str]) -> None:
    celery_worker.take(rollout_ids)
