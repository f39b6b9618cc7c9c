"""The Celery jobs. Their only argument is a rollout's id; everything else is read from Postgres by the claim."""

from __future__ import annotations

from prorl_site.celery import app
from rollouts.worker import celery_worker


@app.task(name="rollouts.init")
def initialize(rollout_id: str) -> None:
    celery_worker.carry_out(rollout_id)


@app.task(name="rollouts.run")
def run(rollout_id: str) -> None:
    celery_worker.carry_out(rollout_id)


@app.task(name="rollouts.eval")
def evaluate(rollout_id: str) -> None:
    celery_worker.carry_out(rollout_id)
