"""Values that may lie in the blob storage, and what the storage holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db.models import Count, Q, Sum

from rollouts.models import Blob, MessagePicture, Project, Rollout, ToolCall, ToolPicture


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


def picture_of(rollout: Rollout, turn: int, call: int, index: int) -> ToolPicture | None:
    """A picture of the newest attempt by its place, if there is one."""
    pictures = ToolPicture.objects.select_related("blob").filter(rollout=rollout, attempt=rollout.attempt)
    return pictures.filter(turn=turn, call=call, index=index).first()


def seen_picture(rollout: Rollout, sha256: str) -> MessagePicture | None:
    """A picture that the newest attempt's model was shown, by its data's digest, if there is one."""
    pictures = MessagePicture.objects.select_related("blob").filter(rollout=rollout, attempt=rollout.attempt)
    return pictures.filter(blob=sha256).first()


class ProjectStorage(NamedTuple):
    """What a project's finished rollouts left: how many still have their trajectory, and the blobs they refer to.

    `blob_bytes` is the size of their contents, `stored_bytes` what these take in the storage.
    """

    rollouts: int
    with_trajectory: int
    blobs: int
    blob_bytes: int
    stored_bytes: int


def project_storage(project: Project) -> ProjectStorage:
    """Blobs that projects share count in full for each of them."""
    finished = Rollout.objects.filter(project=project, finished_at__isnull=False)
    artefacts = Rollout.objects.filter(project=project, artefacts_blob__isnull=False).values("artefacts_blob")
    outputs = ToolCall.objects.filter(rollout__project=project, output_blob__isnull=False).values("output_blob")
    displayed = ToolPicture.objects.filter(rollout__project=project).values("blob")
    seen = MessagePicture.objects.filter(rollout__project=project).values("blob")
    blobs = Blob.objects.filter(Q(pk__in=artefacts) | Q(pk__in=outputs) | Q(pk__in=displayed) | Q(pk__in=seen))
    return ProjectStorage(
        **finished.aggregate(rollouts=Count("id"), with_trajectory=Count("id", filter=Q(trajectory_pruned_at=None))),
        **blobs.aggregate(blobs=Count("pk"), blob_bytes=Sum("size", default=0), stored_bytes=Sum("stored_size", default=0)),
    )
