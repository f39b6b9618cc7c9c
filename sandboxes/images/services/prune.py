"""Which images go when room is wanted: the longest unused first, and never one that something still needs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from sandboxes.backends.state import remove_tree
from sandboxes.images.states import UNFINISHED, ImageState
from sandboxes.images.store import Store
from sandboxes.models import Image, ImageBuild, Sandbox

from .builds import running_names
from .registry import base_of

# A sandbox of it may be about to start.
_IN_USE = timedelta(hours=1)


class Pruned(NamedTuple):
    """An entry of the store that goes. `images` are the names that had it; without any it was left over."""

    digest: str
    size: int
    images: list[str]
    reason: str


def prune_images(
    store: Store,
    *,
    wanted: Collection[str],
    unused_for: timedelta | None,
    most_bytes: int | None,
    dry_run: bool = False,
) -> list[Pruned]:
    """Remove what no image refers to any more, what was unused for `unused_for`, and what is beyond `most_bytes` in all.

    `wanted` are names of images that are needed, besides those of running sandboxes and of builds. An image that goes can be
    built again; its row stays.
    """
    ready = list(Image.objects.filter(state=ImageState.READY.value))
    kept = _needed(ready, wanted)
    sizes = {digest: entry.size for digest in store.digests() if (entry := store.find(digest))}
    owners = {digest: [image for image in ready if image.digest == digest] for digest in sizes}
    unowned = [digest for digest in sizes if not owners[digest] and digest not in kept]
    doomed = [Pruned(digest, sizes[digest], [], "no image has it") for digest in unowned]
    total = sum(sizes.values()) - sum(item.size for item in doomed)
    now = timezone.now()
    uses = {digest: _last_use(owners[digest]) for digest in sizes if owners[digest] and digest not in kept}
    for digest, used in sorted(uses.items(), key=lambda item: item[1]):
        if used > now - _IN_USE:
            break
        names = [image.name for image in owners[digest]]
        if unused_for is not None and used < now - unused_for:
            doomed.append(Pruned(digest, sizes[digest], names, f"not used since {used:%Y-%m-%d %H:%M} UTC"))
        elif most_bytes is not None and total > most_bytes:
            doomed.append(
                Pruned(digest, sizes[digest], names, "the images are larger than allowed, and it is the longest unused")
            )
        else:
            continue
        total -= sizes[digest]
    return doomed if dry_run else [item for item in doomed if _remove(store, item)]


def sweep(store: Store) -> list[str]:
    """Remove what killed builds left behind in the store; what it was."""
    present = store.leftovers()  # before the question what is wanted, so that what begins meanwhile is left alone
    wanted = running_names()
    gone = [name for name in present if name not in wanted]
    for name in gone:
        store.discard(name)
    return gone


def _needed(ready: list[Image], wanted: Collection[str]) -> set[str]:
    """Digests that stay."""
    bases = {base_of(build.image) for build in ImageBuild.objects.filter(state__in=UNFINISHED).select_related("image")}
    running = set(_running().values_list("image", flat=True))
    return running | {image.digest for image in ready if image.name in bases or image.name in wanted or image.warm_target}


def _running() -> QuerySet[Sandbox]:
    return Sandbox.objects.filter(stopped_at=None).exclude(image="")


def _last_use(images: list[Image]) -> datetime:
    return max(image.last_used_at or image.built_at or image.created_at for image in images)


def _remove(store: Store, item: Pruned) -> bool:
    """False when it was built or used in the meantime."""
    with transaction.atomic():
        rows = Image.objects.select_for_update().filter(digest=item.digest)
        found = list(rows)
        if sorted(image.name for image in found) != sorted(item.images) or _running().filter(image=item.digest).exists():
            return False
        if found and _last_use(found) > timezone.now() - _IN_USE:
            return False
        nothing: dict[str, Any] = {"digest": "", "built_as": "", "input_key": "", "size": 0, "env": {}, "labels": {}}
        rows.update(state=ImageState.PENDING.value, **nothing)
        files = store.detach(item.digest)
        if files is None:
            transaction.set_rollback(True)
            return False
    remove_tree(files)
    return True
