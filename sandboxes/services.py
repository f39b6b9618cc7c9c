"""The only code that writes sandbox rows."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from django.utils import timezone

from .models import Sandbox


def sandbox_name(rollout_id: UUID, attempt: int) -> str:
    """Deterministic, so that whoever finds it knows whose it is."""
    return f"prorl-{rollout_id.hex}-{attempt}"


def note_start(*, name: str, rollout_id: UUID, attempt: int, node: str, backend: str) -> None:
    """A sandbox is about to be started. Noting it again is harmless."""
    Sandbox.objects.get_or_create(
        name=name, defaults={"rollout_id": rollout_id, "attempt": attempt, "node": node, "backend": backend}
    )


def note_ready(*, name: str, enforced: Mapping[str, str]) -> None:
    """Its broker answers; `enforced` says what became of each limit."""
    Sandbox.objects.filter(name=name).update(ready_at=timezone.now(), enforced=dict(enforced))


def note_stopped(*, name: str, reason: str) -> None:
    """The backend proved that nothing of it is left."""
    Sandbox.objects.filter(name=name, stopped_at=None).update(stopped_at=timezone.now(), stop_reason=reason)
