"""What a rollout has used of budgets, as expressions over its columns. Earlier attempts count."""

from __future__ import annotations

from django.db.models import Case, DurationField, ExpressionWrapper, F, FloatField, Q, When
from django.db.models.functions import Extract, Now

_HAD_SANDBOX = ~Q(sandbox_name="")
_SINCE_LAST_MOVE = Extract(
    ExpressionWrapper(Now() - F("state_changed_at"), output_field=DurationField()), "epoch", output_field=FloatField()
)

TOKENS = F("earlier_tokens") + F("prompt_tokens") + F("sampled_tokens")
SANDBOX_SECONDS = F("earlier_sandbox_seconds") + Case(
    When(_HAD_SANDBOX, then=F("init_seconds") + F("run_seconds") + F("eval_seconds")), default=0.0
)
# Of a rollout in flight: with the stage that a worker is at.
LIVE_SANDBOX_SECONDS = SANDBOX_SECONDS + Case(
    When(_HAD_SANDBOX & Q(lease_owner__isnull=False), then=_SINCE_LAST_MOVE), default=0.0
)
