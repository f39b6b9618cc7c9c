"""Images as sandboxes use them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from sandboxes.errors import ImageUnavailable
from sandboxes.images.states import ImageState
from sandboxes.images.store import Store
from sandboxes.models import Image
from sandboxes.protocol import HOST, Root

_NOTED_EVERY = timedelta(minutes=1)


class Usable(NamedTuple):
    """What a sandbox of an image is started from; `warm_target` sandboxes of it are kept started on each node."""

    root: Root
    warm_target: int


def image_store() -> Store:
    """Of this installation."""
    return Store(Path(settings.IMAGE_DIR))


def resolve_image(name: str) -> Usable:
    """The root file system that a `SandboxSpec.image` stands for on this node. Raises ImageUnavailable."""
    if not name:
        return Usable(HOST, settings.SANDBOX_WARM)
    # First, since it waits for whoever prunes the image just now.
    unnoted = Q(last_used_at=None) | Q(last_used_at__lt=Now() - _NOTED_EVERY)
    Image.objects.filter(unnoted, name=name, state=ImageState.READY.value).update(last_used_at=Now())
    image = Image.objects.filter(name=name).first()
    if image is None:
        raise ImageUnavailable(f"there is no image {name!r}")
    if image.state != ImageState.READY.value:
        raise ImageUnavailable(f"image {name!r} is {image.state}, not ready")
    store = image_store()
    try:
        entry = store.find(image.digest)
    except OSError as error:
        raise ImageUnavailable(f"image {name!r} cannot be read on node {settings.NODE}: {error}") from error
    if entry is None:
        raise ImageUnavailable(
            f"image {name!r} is ready, but {store.folder} on node {settings.NODE} does not have it: PRORL_IMAGE_DIR must be "
            "the same directory of a shared file system on all nodes"
        )
    return Usable(entry.root, image.warm_target)


def why_unusable(names: Collection[str]) -> dict[str, str]:
    """Of the names those that no sandbox can be started from now, each with a sentence that says why and what to do."""
    wanted = {name for name in names if name}
    states = dict(Image.objects.filter(name__in=wanted).values_list("name", "state")) if wanted else {}
    reasons = {}
    for name in sorted(wanted):
        state = states.get(name)
        if state is None:
            reasons[name] = f"There is no image {name!r}; register it and build it first."
        elif state != ImageState.READY.value:
            reasons[name] = f"The image {name!r} is {state}, not ready. {_REMEDIES[ImageState(state)]}"
    return reasons


_REMEDIES = {
    ImageState.PENDING: "Build it first.",
    ImageState.BUILDING: "Wait for its build to end.",
    ImageState.FAILED: "See the log of its last build, and build it again.",
}
