"""What a run's finished rollouts add up to, so that nobody has to read hundreds of thousands of them again."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.db import models

from .run import Run

# A cell: what the rollouts of a run with the same end have in common (the columns of the group), and their sums.
CELL_GROUP = "state, termination_cause, termination_blame"
CELL_SUMS = """
    count(*), count(reward), count(*) FILTER (WHERE trainable), coalesce(sum(reward), 0), coalesce(sum(reward * reward), 0),
    sum(turns), sum(prompt_tokens), sum(sampled_tokens), sum(infra_retries), extract(epoch FROM max(state_changed_at))::float8
"""


class RunTally(models.Model):
    """The sums over a run's rollouts up to a place in the order of delivery, that place included.

    `cells` is a list of lists: the values of `CELL_GROUP`, then those of `CELL_SUMS`. At the start (`xid` 0) it is empty.
    """

    run = models.OneToOneField(Run, models.CASCADE, primary_key=True, related_name="+")
    xid = models.BigIntegerField(default=0)
    rollout_id = models.UUIDField(default=uuid.UUID(int=0))
    cells: models.JSONField[Any, Any] = models.JSONField(default=list)

    class Meta:
        ordering: ClassVar = ["run"]
        verbose_name_plural = "run tallies"
        indexes: ClassVar = [models.Index(fields=["run"], name="tally_to_count", condition=models.Q(xid=0))]

    def __str__(self) -> str:
        return f"tally of {self.run_id}"
