"""Reading an image again, and trying it: asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.models.functions import Now

from sandboxes.images.errors import ImageBusy
from sandboxes.images.states import ImageState
from sandboxes.models import Image


def request_verification(*, image: Image) -> None:
    """Have a maintenance worker do it. Raises ImageBusy when nothing is built."""
    ready = Image.objects.filter(pk=image.pk, state=ImageState.READY.value)
    if not ready.update(verify_requested_at=Now()):
        raise ImageBusy(f"{image.name} is {image.state}: there is nothing to verify.")


def take_verification() -> Image | None:
    """One that was asked for. A worker that dies over it leaves it undone: it can be asked for again."""
    asked = Image.objects.filter(state=ImageState.READY.value, verify_requested_at__isnull=False)
    for image in asked.order_by("verify_requested_at"):
        taken = asked.filter(pk=image.pk, verify_requested_at=image.verify_requested_at)
        if taken.update(verify_requested_at=None):
            return image
    return None


def note_verified(*, image: Image, problems: Sequence[str]) -> None:
    """Of what was built as `image.digest`; nothing when it was built anew in the meantime."""
    Image.objects.filter(pk=image.pk, digest=image.digest).update(verified_at=Now(), verify_problem="\n".join(problems))
