"""The only code that writes sandbox rows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from .models import Sandbox

FIRST_RETRY = timedelta(seconds=5)
LONGEST_RETRY = timedelta(minutes=5)
_MAX_ERROR = 2000


def sandbox_name(rollout_id: UUID, attempt: int) -> str:
    """Deterministic, so that whoever finds it knows whose it is."""
    return f"prorl-{rollout_id.hex}-{attempt}"


def note_start(*, name: str, rollout_id: UUID, attempt: int, node: str, backend: str, image: str = "") -> None:
    """A sandbox of a rollout is about to be started; `image` is the digest of its root. Noting it again is harmless."""
    Sandbox.objects.get_or_create(
        name=name,
        defaults={"rollout_id": rollout_id, "attempt": attempt, "node": node, "backend": backend, "image": image},
    )


def note_warm_start(*, name: str, holder: UUID, node: str, backend: str, image: str) -> None:
    """The worker process `holder` is about to start a sandbox for whichever rollout comes; `image` is its digest."""
    Sandbox.objects.create(name=name, holder=holder, node=node, backend=backend, image=image)


def release_warm(*, name: str) -> None:
    """Its holder wants it no more: whoever sweeps may stop it."""
    Sandbox.objects.filter(name=name).update(holder=None)


def note_ready(*, name: str, enforced: Mapping[str, str]) -> None:
    """Its broker answers; `enforced` says what became of each limit."""
    Sandbox.objects.filter(name=name).update(ready_at=timezone.now(), enforced=dict(enforced))


def note_stopped(*, name: str, reason: str) -> None:
    """The backend proved that nothing of it is left; also of one that was abandoned, whose node came back."""
    unproven = Sandbox.objects.filter(Q(stopped_at=None) | Q(abandoned=True), name=name)
    unproven.update(stopped_at=timezone.now(), stop_reason=reason, abandoned=False)


def note_stop_failed(*, name: str, error: str) -> Sandbox | None:
    """Stopping it failed once more: it is to be tried again, each time after a longer pause. None for an unknown name."""
    with transaction.atomic():
        sandbox = Sandbox.objects.select_for_update().filter(name=name, stopped_at=None).first()
        if sandbox is None:
            return None
        pause = min(FIRST_RETRY * 2**sandbox.stop_attempts, LONGEST_RETRY)
        sandbox.stop_attempts += 1
        sandbox.stop_error = error[:_MAX_ERROR]
        sandbox.stop_retry_at = timezone.now() + pause
        sandbox.save(update_fields=["stop_attempts", "stop_error", "stop_retry_at"])
        return sandbox


def abandon(sandboxes: QuerySet[Sandbox], *, reason: str) -> int:
    """Close rows of sandboxes that nobody can reach any more, without claiming that nothing of them is left."""
    return sandboxes.filter(stopped_at=None).update(stopped_at=timezone.now(), stop_reason=reason, abandoned=True)
