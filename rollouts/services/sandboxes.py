"""Which sandboxes of a node rollouts still need."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.db.models import Exists, OuterRef
from django.utils import timezone

from rollouts.lifecycle import ACTIVE, RescoringState
from rollouts.models import Rescoring, Rollout
from sandboxes.models import Sandbox

# A worker that lost its rollout stops the sandbox itself; the janitor leaves it this much time.
_PATIENCE = timedelta(seconds=10)


def unneeded_sandboxes(*, node: str, present: Sequence[str]) -> list[str]:
    """Names to stop: rows not proven stopped whose attempt is over, and `present` directories without such a row."""
    current = Rollout.objects.filter(
        id=OuterRef("rollout_id"), attempt=OuterRef("attempt"), state__in=[state.value for state in ACTIVE]
    )
    rescoring = Rescoring.objects.filter(sandbox_name=OuterRef("name"), state=RescoringState.RUNNING.value)
    rows = Sandbox.objects.filter(node=node, stopped_at=None).annotate(needed=Exists(current) | Exists(rescoring))
    known = {name: needed for name, needed in rows.values_list("name", "needed")}
    old = set(rows.filter(created_at__lt=timezone.now() - _PATIENCE).values_list("name", flat=True))
    over = [name for name, needed in known.items() if not needed and name in old]
    unknown = [name for name in present if name not in known]
    return over + unknown
