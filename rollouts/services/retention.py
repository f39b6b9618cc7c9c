"""What is removed when it is old enough. Nothing of an unfinished rollout, nothing of a run that is marked `keep`.

Everything goes in small batches, each a transaction of its own that waits for no lock, so that it can be killed at any point,
run beside everything else, and run twice at once.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from rollouts.models import (
    IdempotentResponse,
    Message,
    MessagePicture,
    ModelCall,
    Project,
    Rescoring,
    Rollout,
    RolloutEvent,
    Run,
    StageFailure,
    ToolCall,
    ToolPicture,
    WebhookDelivery,
    WorkerProcess,
)
from sandboxes.models import Sandbox

from . import blobs

logger = logging.getLogger(__name__)

_SECONDS_FOR_EACH_KIND = 120.0
_ROLLOUTS = 50  # of a batch; each may have thousands of rows
_ROWS = 1000

# How long a blob stays that nobody refers to: far longer than any writer takes from storing it to referring to it.
_BLOB_GRACE = timedelta(days=1)
_IDEMPOTENCY = timedelta(days=1)  # promised in docs/reference/api.md


class Kind(NamedTuple):
    """Something that ages. `due` says how much would go now; `batch` removes some and says how much, 0 at the end."""

    name: str
    due: Callable[[], int]
    batch: Callable[[], int]


class Pruned(NamedTuple):
    """How much of a kind went, and what stopped it (the others are pruned all the same)."""

    kind: str
    removed: int
    error: Exception | None = None


def count_prunable() -> dict[str, int]:
    """What `prune` would remove now, by kind. Blobs that become unreferenced only then are not counted."""
    return {kind.name: kind.due() for kind in _kinds()}


def prune(*, seconds_for_each_kind: float = _SECONDS_FOR_EACH_KIND) -> list[Pruned]:
    """Remove what is due. What there was no time for is due the next time."""
    return [_prune(kind, time.monotonic() + seconds_for_each_kind) for kind in _kinds()]


def _prune(kind: Kind, deadline: float) -> Pruned:
    removed = 0
    try:
        while time.monotonic() < deadline and (gone := kind.batch()):
            removed += gone
    except Exception as error:  # a storage that is down must not keep rows
        logger.exception("pruning %s failed; the next pass tries again", kind.name)
        return Pruned(kind.name, removed, error)
    if removed:
        logger.info("pruned %d %s", removed, kind.name)
    return Pruned(kind.name, removed)


def set_run_keep(*, run: Run, keep: bool) -> None:
    """Exempt a run's rollouts from retention, or subject them to it again. What was pruned does not come back."""
    run.keep = keep
    run.save(update_fields=["keep"])


def _kinds() -> list[Kind]:
    now = timezone.now()
    old = now - timedelta(days=settings.KEEP_RECORDS_DAYS)
    return [
        _HISTORIES.kind(now),
        _TRAJECTORIES.kind(now),
        _rows("sandbox rows", Sandbox.objects.filter(stopped_at__isnull=False, created_at__lt=old)),
        _rows("webhook deliveries", WebhookDelivery.objects.filter(settled_at__lt=old)),
        _rows("idempotent answers", IdempotentResponse.objects.filter(created_at__lt=now - _IDEMPOTENCY)),
        _rows("worker processes", _gone_workers(old)),
        # Last: what went above may have been the last that referred to them.
        Kind("blobs", blobs.unreferenced(untouched_since=now - _BLOB_GRACE).count, _BlobShards(now - _BLOB_GRACE).batch),
    ]


# --- Rollouts ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfRollouts:
    """Rows of rollouts that ended more days ago than a column of their project says."""

    name: str
    days: str  # the project's column
    marker: str  # the rollout's column that says when they went
    rows: tuple[Any, ...]
    values: dict[str, Any] = field(default_factory=dict)  # what else of the rollout goes

    def kind(self, now: datetime) -> Kind:
        return Kind(self.name, lambda: sum(due.count() for due in self._due(now)), lambda: self._batch(now))

    def _due(self, now: datetime) -> Iterator[QuerySet[Rollout]]:
        """By project."""
        being_scored = Rescoring.objects.filter(rollout=OuterRef("id"), finished_at=None)
        for project, days in Project.objects.exclude(**{self.days: None}).values_list("id", self.days):
            rollouts = Rollout.objects.filter(project=project, finished_at__lt=now - timedelta(days=days))
            yield rollouts.filter(~Exists(being_scored), run__keep=False, **{self.marker: None})

    def _batch(self, now: datetime) -> int:
        """Of the first project that has any."""
        return next((gone for due in self._due(now) if (gone := self._remove(due, now))), 0)

    def _remove(self, due: QuerySet[Rollout], now: datetime) -> int:
        with transaction.atomic():
            locked = due.order_by("finished_at").select_for_update(skip_locked=True, of=("self",))
            ids = list(locked.values_list("id", flat=True)[:_ROLLOUTS])
            for model in self.rows:
                model.objects.filter(rollout_id__in=ids).delete()
            Rollout.objects.filter(id__in=ids).update(**{self.marker: now}, **self.values)
        return len(ids)


_HISTORIES = _OfRollouts("histories", "keep_events_days", "events_pruned_at", (RolloutEvent, StageFailure))
# The rollout's row, its rewards and its termination stay.
_TRAJECTORIES = _OfRollouts(
    "trajectories",
    "keep_trajectories_days",
    "trajectory_pruned_at",
    (Message, MessagePicture, ModelCall, ToolCall, ToolPicture),
    {"artefacts": {}, "artefacts_blob": None},
)


# --- Rows -------------------------------------------------------------------------------------------------------------------


def _rows(name: str, rows: QuerySet[Any]) -> Kind:
    """Rows that go as they are."""

    def batch() -> int:
        with transaction.atomic():
            locked = rows.order_by().select_for_update(skip_locked=True, of=("self",))
            ids = list(locked.values_list("pk", flat=True)[:_ROWS])
            rows.model._default_manager.filter(pk__in=ids).delete()
        return len(ids)

    return Kind(name, rows.count, batch)


def _gone_workers(old: datetime) -> QuerySet[WorkerProcess]:
    """Those that the rescuer still has to take something back from stay."""
    gone = WorkerProcess.objects.filter(Q(stopped_at__lt=old) | Q(lost_at__lt=old))
    held = (Rollout.objects.filter(lease_owner=OuterRef("id")), Rescoring.objects.filter(owner=OuterRef("id")))
    return gone.filter(*(~Exists(rows) for rows in held))


# --- Blobs ------------------------------------------------------------------------------------------------------------------


class _BlobShards:
    """Goes through the shards once, from a random one on, so that none is left out each time that time is short."""

    def __init__(self, limit: datetime) -> None:
        self._limit = limit
        first = random.randrange(len(blobs.SHARDS))  # noqa: S311
        self._left = [*blobs.SHARDS[first:], *blobs.SHARDS[:first]]
        self._folders: list[str] = []

    def batch(self) -> int:
        while self._left or self._folders:
            if self._folders:
                gone = blobs.sweep_files(folder=self._folders.pop(), older_than=self._limit)
            elif not (gone := blobs.remove_unreferenced(shard=self._left[0], untouched_since=self._limit)):
                self._folders = blobs.folders(shard=self._left.pop(0))
            if gone:
                return gone
        return 0
