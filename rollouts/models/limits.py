"""What a project or a run may use, and what it has used. The same columns on both."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

from rollouts.lifecycle import Limit

# What runs out while rollouts run. The other limits are checked when something is submitted or started.
BUDGETS = (Limit.MAX_TOKENS, Limit.MAX_SANDBOX_SECONDS, Limit.MAX_WALL_SECONDS)
HAS_BUDGET = (
    models.Q(max_tokens__isnull=False) | models.Q(max_sandbox_seconds__isnull=False) | models.Q(max_wall_seconds__isnull=False)
)


def _limit(help_text: str) -> Any:
    return models.PositiveBigIntegerField(null=True, blank=True, validators=[MinValueValidator(1)], help_text=help_text)


class Limits(models.Model):
    """Limits are null for none. The used amounts only grow, and only `rollouts.services` writes them."""

    created_at = models.DateTimeField(default=timezone.now, editable=False)

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

    def maximum(self, limit: Limit) -> int | None:
        value: int | None = getattr(self, limit.value)
        return value

    @property
    def use(self) -> dict[Limit, float]:
        """What counts against each limit but max_in_flight. Tokens and sandbox seconds are those of finished rollouts."""
        return {
            Limit.MAX_QUEUED: self.used_rollouts - self.finished_rollouts,
            Limit.MAX_ROLLOUTS: self.used_rollouts,
            Limit.MAX_TOKENS: self.used_tokens,
            Limit.MAX_SANDBOX_SECONDS: self.used_sandbox_seconds,
            Limit.MAX_WALL_SECONDS: (timezone.now() - self.created_at).total_seconds(),
        }

    def budget_reached(self, live: Mapping[Limit, float] = MappingProxyType({})) -> Limit | None:
        """The budget that is used up, if any, when `live` is used on top by rollouts in flight."""
        use = self.use
        for limit in BUDGETS:
            maximum = self.maximum(limit)
            if maximum is not None and use[limit] + live.get(limit, 0) >= maximum:
                return limit
        return None
