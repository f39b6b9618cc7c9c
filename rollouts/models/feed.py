"""Where each consumer of the stream of finished rollouts has got to."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models


class FeedCursor(models.Model):
    """The last finished rollout that one consumer has dealt with, in the order of delivery (see `selectors.results`)."""

    consumer = models.CharField(max_length=40, primary_key=True)
    xid = models.BigIntegerField(default=0)
    rollout_id = models.UUIDField(default=uuid.UUID(int=0))

    class Meta:
        ordering: ClassVar = ["consumer"]

    def __str__(self) -> str:
        return self.consumer
