"""New rollouts enter the queue, a hundred thousand of them as quickly as Postgres writes rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone

from rollouts.lifecycle import EventKind, State
from rollouts.models import Group, Rollout, Run
from rollouts.models.fields import uuid7

from .transition import DISPATCH_CHANNEL

_BATCH = 10_000
# What differs between the rollouts of a submission. Everything else they have in common, and it is sent once.
_OWN = {
    "id": "uuid",
    "group_id": "uuid",
    "task_id": "uuid",
    "environment_id": "uuid",
    "index": "int",
    "required_version": "int",
}

_INSERT = """
WITH queued AS (
    INSERT INTO rollouts_rollout ({own}, {common})
    SELECT {own}, {values} FROM unnest({arrays}) AS own ({own}) RETURNING id, state_changed_at, state
)
INSERT INTO rollouts_rolloutevent (rollout_id, attempt, at, kind, from_state, to_state, data)
SELECT id, 0, state_changed_at, %s, '', state, '{{}}' FROM queued
"""


def queue_rollouts(run: Run, groups: Sequence[Group], versions: Sequence[int | None]) -> None:
    """Insert the n rollouts of each group with their first event, and tell the dispatcher.

    The groups' tasks must be loaded with their datasets. `versions` are the policy versions they require, one for each group.
    """
    now = timezone.now()
    alike = Rollout(
        project_id=run.project_id,
        run=run,
        priority=run.priority,
        state=State.QUEUED.value,
        created_at=now,
        state_changed_at=now,
    )
    fields = [field for field in Rollout._meta.concrete_fields if field.column not in _OWN]
    common = [field.get_db_prep_save(getattr(alike, field.attname), connection) for field in fields]
    statement = _INSERT.format(
        own=", ".join(f'"{column}"' for column in _OWN),
        common=", ".join(f'"{field.column}"' for field in fields),
        values=", ".join("%s" for _ in fields),
        arrays=", ".join(f"%s::{kind}[]" for kind in _OWN.values()),
    )
    rows = _rows(groups, versions)
    with connection.cursor() as cursor:
        while batch := list(itertools.islice(rows, _BATCH)):
            arrays = [list(column) for column in zip(*batch, strict=True)]
            cursor.execute(statement, [*common, *arrays, EventKind.SUBMITTED.value])
        cursor.execute("SELECT pg_notify(%s, '')", [DISPATCH_CHANNEL])
    if sum(group.n for group in groups) >= _BATCH:
        transaction.on_commit(_refresh_statistics)


def _refresh_statistics() -> None:
    """Plans that were made for a small table read all of a large one until autovacuum looks in, up to a minute later."""
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE (SKIP_LOCKED) rollouts_rollout")


def _rows(groups: Sequence[Group], versions: Sequence[int | None]) -> Iterator[tuple[UUID, UUID, UUID, UUID, int, int | None]]:
    """In the order of `_OWN`."""
    for group, version in zip(groups, versions, strict=True):
        environment_id = group.task.dataset.environment_id
        for index in range(group.n):
            yield uuid7(), group.id, group.task_id, environment_id, index, version
