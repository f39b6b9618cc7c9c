"""What has to happen once for every finished rollout, off the workers' path: usage, metrics, webhooks.

The rollouts themselves are the outbox. A consumer reads them in the order of delivery (ADR 7) and writes what follows from them
in the transaction that moves its cursor, so nothing is missed and nothing is done twice, whatever is killed in between.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from django.db import connection, transaction

from rollouts.models import FeedCursor
from rollouts.models.feed import SETTLED

BATCH = 1000

_NEXT = f"""
SELECT id, finished_xid FROM rollouts_rollout
WHERE finished_xid IS NOT NULL AND (finished_xid, id) > (%s, %s)
  AND finished_xid < {SETTLED}
ORDER BY finished_xid, id LIMIT %s
"""  # noqa: S608 - constants


def advance(consumer: str, apply: Callable[[list[UUID]], None]) -> int:
    """Give the next finished rollouts, at most `BATCH`, to `apply` and move the consumer's cursor; how many there were.

    `apply` runs in the transaction of the move and may only write to the database. One process at a time gets through; a
    second one waits for the first.
    """
    FeedCursor.objects.get_or_create(consumer=consumer)
    with transaction.atomic():
        cursor = FeedCursor.objects.select_for_update().get(consumer=consumer)
        with connection.cursor() as statement:
            statement.execute(_NEXT, [cursor.xid, cursor.rollout_id, BATCH])
            rows = statement.fetchall()
        if not rows:
            return 0
        apply([id_ for id_, _ in rows])
        cursor.rollout_id, cursor.xid = rows[-1]
        cursor.save()
    return len(rows)
