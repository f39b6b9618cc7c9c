"""What a project or a run may use, and what it has used. The same columns on both."""

from __future__ import annotations

from typing import Any

from django.core.validators import MinValueValidator
from django.db import models

from rollouts.lifecycle import Limit


def _limit(help_text: str) -> Any:
    return models.PositiveBigIntegerField(null=True, blank=True, validators=[MinValueValidator(1)], help_text=help_text)


class Limits(models.Model):
    """Limits are null for none. The used amounts only grow, and only `rollouts.services` writes them."""

    max_in_flight = _limit("Rollouts started and not finished at once; the dispatcher holds back the others.")
    max_queued = _limit("Rollouts accepted and not finished at once; more are refused until some have finished.")
    max_rollouts = _limit("Rollouts accepted in all.")
    max_tokens = _limit("Prompt and sampled tokens of all attempts; a prompt that grows by turns is counted once.")
    max_sandbox_seconds = _limit("Seconds of INIT, RUN and EVAL of all attempts that had a sandbox.")
    max_wall_seconds = _limit("Seconds since it was created.")

    used_rollouts = models.PositiveBigIntegerField(default=0, editable=False, help_text="Accepted.")
    finished_rollouts = models.PositiveBigIntegerField(default=0, editable=False, help_text="Of these, finished.")
    used_tokens = models.PositiveBigIntegerField(default=0, editable=False, help_text="Of finished rollouts.")
    used_sandbox_seconds = models.FloatField(default=0, editable=False, help_text="Of finished rollouts.")
    exhausted_at = models.DateTimeField(null=True, editable=False, help_text="When a budget ran out.")
    exhausted_by = models.CharField(
        max_length=20, blank=True, editable=False, choices=[(limit.value, limit.value) for limit in Limit]
    )

    class Meta:
        abstract = True

    @property
    def unfinished_rollouts(self) -> int:
        return self.used_rollouts - self.finished_rollouts
