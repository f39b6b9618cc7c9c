"""Where each consumer of the stream of finished rollouts has got to."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models

# Only what finished in a transaction with a smaller id than this can be delivered or counted: nothing can come before it any
# more (see selectors/results.py).
SETTLED = "pg_snapshot_xmin(pg_current_snapshot())::text::bigint"


class FeedCursor(models.Model):
    """The last finished rollout that one consumer has dealt with, in the order of delivery (see `selectors.results`)."""

    consumer = models.CharField(max_length=40, primary_key=True)
    xid = models.BigIntegerField(default=0)
    rollout_id = models.UUIDField(default=uuid.UUID(int=0))

    class Meta:
        ordering: ClassVar = ["consumer"]

    def __str__(self) -> str:
        return self.consumer
