"""What failed in a rollout's stages, kept beside the attempts."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

from django.db.models import Count

from rollouts.engine.errors import Failure
from rollouts.lifecycle import AfterFailure, Stage
from rollouts.models import StageFailure, WorkerProcess

from .storable import storable_text


def retries_by_stage(rollout_id: UUID) -> Counter[Stage]:
    """How often each stage of a rollout was repeated, over all its attempts."""
    repeated = StageFailure.objects.filter(rollout_id=rollout_id).exclude(retried_as=AfterFailure.GAVE_UP.value)
    return Counter({Stage(stage): n for stage, n in repeated.order_by().values_list("stage").annotate(Count("id"))})


def note_failure(
    *, rollout_id: UUID, attempt: int, stage: Stage, owner: UUID | None, failure: Failure, after: AfterFailure
) -> None:
    """Keep a failure and what was done about it. Wants the transaction of the move that did it."""
    worker = WorkerProcess.objects.filter(id=owner).first() if owner else None
    StageFailure.objects.create(
        rollout_id=rollout_id,
        attempt=attempt,
        stage=stage.value,
        worker=owner,
        node=worker.node if worker else "",
        pid=worker.pid if worker else None,
        cause=failure.termination.cause.value,
        blame=failure.termination.blame.value,
        detail=storable_text(failure.termination.detail),
        traceback=storable_text(failure.traceback),
        retried_as=after.value,
    )
