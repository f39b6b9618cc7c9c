"""The life of a build: asked for, taken by a worker, ended. Every write is guarded by who has it.

Rows are locked image first, then build.
"""

from __future__ import annotations

import enum
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from sandboxes.images.states import UNFINISHED, BuildState, Format, ImageState
from sandboxes.images.store import Entry
from sandboxes.models import Image, ImageBuild

from .registry import base_of

TRIES = 3
TAIL_CHARACTERS = 16_384

_FIRST_RETRY_SECONDS = 10.0
_BASE_SECONDS = 5.0  # until a build looks again whether its base is there
_LEASES = 3  # in leases of workers: losing an hour's work to a short outage is worse than noticing a lost worker late
_MOST_ERROR = 8000
_FREE: dict[str, Any] = {"owner": None, "lease_expires_at": None}


@dataclass(frozen=True)
class BuildClaim:
    """A build in the hands of one worker. `owner` is new with every claim, and fences the writes of an earlier one."""

    build_id: int
    number: int
    owner: uuid.UUID
    image: str
    kind: str
    source: Mapping[str, Any]
    format: Format
    force: bool
    base: str
    base_digest: str

    @property
    def name(self) -> str:
        """Of its workspace and its sandbox."""
        return build_name(self.build_id, self.owner)


@dataclass(frozen=True)
class Report:
    """How far a build is: all that is said of it with a heartbeat, and at its end."""

    progress: float = 0.0
    step: str = ""
    log_tail: str = ""
    log_length: int = 0


class Answer(enum.Enum):
    """What a worker is told in return."""

    GO_ON = "go on"
    CANCEL = "somebody asked to cancel it"
    LOST = "it belongs to somebody else now"


def build_name(build_id: int, owner: uuid.UUID) -> str:
    """What one claim of a build leaves on a node, if it is killed, is called like this."""
    return f"build-{build_id}-{owner.hex[:12]}"


def request_build(*, image: Image, force: bool = False, by: str = "") -> ImageBuild:
    """Have an image built, with `force` also when nothing has changed; where a build is not finished yet, that one.

    A base that is not ready is built as well.
    """
    base = Image.objects.filter(name=base_of(image)).exclude(state=ImageState.READY.value).first()
    if base is not None:
        request_build(image=base, by=by)
    with transaction.atomic():
        locked = Image.objects.select_for_update().get(pk=image.pk)
        if unfinished := ImageBuild.objects.filter(image=locked, state__in=UNFINISHED).first():
            return unfinished
        _move(locked, ImageState.FAILED, ImageState.PENDING)
        newest = ImageBuild.objects.filter(image=locked).order_by("-number").first()
        number = newest.number + 1 if newest else 1
        return ImageBuild.objects.create(image=locked, number=number, force=force, requested_by=by)


def cancel_build(*, build: ImageBuild) -> bool:
    """End a build. One that runs is ended by its worker, with its next heartbeat. False: it was over already."""
    with transaction.atomic():
        Image.objects.select_for_update().get(pk=build.image_id)
        rows = ImageBuild.objects.filter(pk=build.pk)
        if rows.filter(state=BuildState.QUEUED.value).update(state=BuildState.CANCELLED.value, finished_at=Now()):
            return True
        return bool(rows.filter(state=BuildState.RUNNING.value, cancel_requested_at=None).update(cancel_requested_at=Now()))


def note_news() -> int:
    """How many builds have become due since this was last asked: worth telling the workers."""
    return _due().filter(hinted_at=None).update(hinted_at=Now())


def claim_build(*, node: str, only: int | None = None) -> BuildClaim | None:
    """Take the build that has waited longest, or the one with the id `only`; None when nothing can be taken."""
    due = _due() if only is None else ImageBuild.objects.filter(pk=only)
    for build_id, image_id in list(due.order_by("created_at").values_list("id", "image_id")):
        with transaction.atomic():
            image = Image.objects.select_for_update().get(pk=image_id)
            base = Image.objects.filter(name=base_of(image)).first()
            queued = ImageBuild.objects.filter(pk=build_id, state=BuildState.QUEUED.value)
            if base is not None and ImageBuild.objects.filter(image=base, state__in=UNFINISHED).exists():
                queued.update(not_before=Now() + timedelta(seconds=_BASE_SECONDS), step=f"waits for {base.name}")
                continue
            owner = uuid.uuid4()
            if not queued.update(
                state=BuildState.RUNNING.value,
                owner=owner,
                node=node,
                lease_expires_at=_lease_end(),
                tries=F("tries") + 1,
                started_at=Now(),
                **vars(Report()),
            ):
                continue  # somebody else was first
            _move(image, ImageState.PENDING, ImageState.BUILDING)
            build = ImageBuild.objects.get(pk=build_id)
            return BuildClaim(
                build_id=build_id,
                number=build.number,
                owner=owner,
                image=image.name,
                kind=image.kind,
                source=image.source,
                format=Format(image.format),
                force=build.force,
                base=base_of(image),
                base_digest=base.digest if base else "",
            )
    return None


def report_build(*, claim: BuildClaim, report: Report) -> Answer:
    """The heartbeat: renews the lease, and tells how far the build is."""
    held = _held(claim)
    if not held.update(lease_expires_at=_lease_end(), **vars(report)):
        return Answer.LOST
    return Answer.CANCEL if held.filter(cancel_requested_at__isnull=False).exists() else Answer.GO_ON


def digest_built_from(*, key: str, format: Format) -> str:
    """Of an image that was made from the same, in the same form; "" when there is none."""
    rows = Image.objects.filter(input_key=key, built_as=format.value, state=ImageState.READY.value)
    return rows.values_list("digest", flat=True).first() or ""


def finish_build(*, claim: BuildClaim, entry: Entry, key: str, report: Report) -> bool:
    """The image is ready. False, and nothing is changed, when the build belongs to somebody else now."""
    with transaction.atomic():
        image = Image.objects.select_for_update().get(builds=claim.build_id)
        done = _held(claim).update(
            state=BuildState.SUCCEEDED.value, finished_at=Now(), error="", digest=entry.digest, **_FREE, **vars(report)
        )
        if done:
            Image.objects.filter(pk=image.pk).update(
                state=ImageState.READY.value,
                digest=entry.digest,
                built_as=entry.format.value,
                input_key=key,
                size=entry.size,
                env=dict(entry.env),
                labels=dict(entry.labels),
                built_at=Now(),
                verified_at=None,
                verify_problem="",
            )
        return bool(done)


def fail_build(*, claim: BuildClaim, error: str, retryable: bool, report: Report) -> bool:
    """This try failed. It is repeated after a pause if that may help. False when it belongs to somebody else now."""
    return _fail(_held(claim), claim.build_id, error, retryable, vars(report))


def end_cancelled_build(*, claim: BuildClaim, report: Report) -> bool:
    """Nothing of it goes on any more."""
    return _end(_held(claim), claim.build_id, BuildState.CANCELLED, ImageState.PENDING, {"finished_at": Now(), **vars(report)})


def give_back_build(*, claim: BuildClaim, report: Report) -> bool:
    """The worker stops: somebody else begins anew, and no try is counted."""
    values = {"tries": F("tries") - 1, "hinted_at": None, **vars(report)}
    return _end(_held(claim), claim.build_id, BuildState.QUEUED, ImageState.PENDING, values)


def take_back_lost_builds() -> int:
    """Builds whose worker has fallen silent are tried again, a few times; how many there were."""
    lost = ImageBuild.objects.filter(state=BuildState.RUNNING.value, lease_expires_at__lt=Now())
    taken = 0
    for build in lost:
        held = lost.filter(pk=build.pk, owner=build.owner)
        if build.cancel_requested_at is not None:
            taken += _end(held, build.pk, BuildState.CANCELLED, ImageState.PENDING, {"finished_at": Now()})
        else:
            taken += _fail(held, build.pk, f"its worker on {build.node} fell silent", retryable=True, values={})
    return taken


def running_names(node: str = "") -> set[str]:
    """What the builds that run, on this node or everywhere, may have in the store and among the sandboxes."""
    running = ImageBuild.objects.filter(state=BuildState.RUNNING.value, owner__isnull=False)
    if node:
        running = running.filter(node=node)
    return {build_name(build_id, owner) for build_id, owner in running.values_list("id", "owner") if owner}


def _due() -> QuerySet[ImageBuild]:
    return ImageBuild.objects.filter(Q(not_before=None) | Q(not_before__lte=Now()), state=BuildState.QUEUED.value)


def _held(claim: BuildClaim) -> QuerySet[ImageBuild]:
    return ImageBuild.objects.filter(pk=claim.build_id, owner=claim.owner, state=BuildState.RUNNING.value)


def _lease_end() -> Any:
    return Now() + timedelta(seconds=_LEASES * settings.LEASE_SECONDS)


def _fail(held: QuerySet[ImageBuild], build_id: int, error: str, retryable: bool, values: dict[str, Any]) -> bool:
    tries = held.values_list("tries", flat=True).first()
    values = {**values, "error": error[-_MOST_ERROR:]}
    if tries is not None and retryable and tries < TRIES:
        pause = _FIRST_RETRY_SECONDS * 3 ** (tries - 1) * random.uniform(0.7, 1.3)  # noqa: S311 - only spreads them
        values |= {"not_before": Now() + timedelta(seconds=pause), "hinted_at": None, "step": "waits for another try"}
        return _end(held, build_id, BuildState.QUEUED, ImageState.PENDING, values)
    return _end(held, build_id, BuildState.FAILED, ImageState.FAILED, {**values, "finished_at": Now()})


def _end(held: QuerySet[ImageBuild], build_id: int, to: BuildState, image_to: ImageState, values: dict[str, Any]) -> bool:
    """The build leaves its worker; the image, unless something from before can be used, goes to `image_to`."""
    with transaction.atomic():
        image = Image.objects.select_for_update().get(builds=build_id)
        if not held.update(state=to.value, **_FREE, **values):
            return False
        _move(image, ImageState.BUILDING, image_to)
        return True


def _move(image: Image, from_state: ImageState, to: ImageState) -> None:
    """One step in the life of a locked image; nothing when it is elsewhere: one that is READY stays so."""
    Image.objects.filter(pk=image.pk, state=from_state.value).update(state=to.value)
