"""Values that may lie in the blob storage, and what the storage holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db.models import Count, Q, Sum

from rollouts.models import Blob, Project, Rollout, ToolCall


def whole_artefacts(rollout: Rollout) -> dict[str, Any]:
    """What RUN left for evaluation, wherever it lies. Raises `BlobUnreadable`."""
    artefacts: dict[str, Any] = rollout.artefacts_blob.json() if rollout.artefacts_blob else rollout.artefacts
    return artefacts


def whole_output(call: ToolCall) -> str:
    """All that a tool call printed, wherever it lies. Raises `BlobUnreadable`."""
    return call.output_blob.text() if call.output_blob else call.output


def tool_call_of(rollout: Rollout, turn: int, index: int) -> ToolCall | None:
    """A tool call of the newest attempt by its place, if there is one."""
    calls = ToolCall.objects.select_related("output_blob").filter(rollout=rollout, attempt=rollout.attempt)
    return calls.filter(turn=turn, index=index).first()


class BlobUse(NamedTuple):
    """`size` is that of the contents, `stored` what they take in the storage; both in bytes."""

    blobs: int
    size: int
    stored: int


def blob_use() -> BlobUse:
    """Of the whole installation."""
    return _use(Blob.objects.all())


class ProjectStorage(NamedTuple):
    """How many finished rollouts of a project still have their trajectory, and the blobs they refer to."""

    rollouts: int
    with_trajectory: int
    blobs: BlobUse


def project_storage(project: Project) -> ProjectStorage:
    """Blobs that projects share count in full for each of them."""
    finished = Rollout.objects.filter(project=project, finished_at__isnull=False)
    counted = finished.aggregate(rollouts=Count("id"), with_trajectory=Count("id", filter=Q(trajectory_pruned_at=None)))
    artefacts = Rollout.objects.filter(project=project, artefacts_blob__isnull=False).values("artefacts_blob")
    outputs = ToolCall.objects.filter(rollout__project=project, output_blob__isnull=False).values("output_blob")
    return ProjectStorage(**counted, blobs=_use(Blob.objects.filter(Q(pk__in=artefacts) | Q(pk__in=outputs))))


def _use(blobs: Any) -> BlobUse:
    totals = blobs.aggregate(blobs=Count("pk"), size=Sum("size", default=0), stored=Sum("stored_size", default=0))
    return BlobUse(totals["blobs"], int(totals["size"]), int(totals["stored"]))
