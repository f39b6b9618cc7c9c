"""Images in every state, as the tests of images need them."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

from django.utils import timezone

from sandboxes.images.digest import read_contents
from sandboxes.images.services.builds import BuildClaim, Report, claim_build, fail_build, finish_build, request_build
from sandboxes.images.services.registry import register_image
from sandboxes.images.states import Format
from sandboxes.images.store import Entry, Store
from sandboxes.models import Image, ImageBuild

DAY = timedelta(days=1)
REPORT = Report(0.5, "unpacking", "<b>a log</b>\n", 13)
SOURCE = {"path": "/srv/busy.tar"}


def an_image(name: str = "busy", path: str = SOURCE["path"]) -> Image:
    """Registered, and nothing more."""
    return register_image(name=name, kind="tarball", source={"path": path})


def an_entry(digit: str = "a") -> Entry:
    """As if it were in the store."""
    return Entry(f"sha256-{digit * 64}", Format.DIRECTORY, 5 << 20, Path("/x"), {"PATH": "/opt/bin"}, {})


def claimed(image: Image) -> BuildClaim:
    """A build of it in the hands of a worker on n1."""
    request_build(image=image)
    claim = claim_build(node="n1")
    assert claim is not None
    return claim


def finish(claim: BuildClaim, entry: Entry | None = None) -> bool:
    return finish_build(claim=claim, entry=entry or an_entry(), key=claim.image, report=REPORT)


def fail(claim: BuildClaim, error: str = "mirror away", *, retryable: bool = False) -> bool:
    return fail_build(claim=claim, error=error, retryable=retryable, report=REPORT)


def newest_build(image: Image) -> ImageBuild:
    return ImageBuild.objects.filter(image=image).latest("number")


def state_of(image: Image) -> str:
    image.refresh_from_db()
    return image.state


def stored_image(store: Store, name: str = "busy", content: bytes = b"") -> Image:
    """READY and in the store, as it was built two days ago; its files are `content`, or else differ with its name."""
    with store.workspace(f"build-of-{name}") as workspace:
        root = workspace / "rootfs"
        root.mkdir()
        (root / "motd").write_bytes(content or name.encode())
        entry = store.add(root, Format.DIRECTORY, read_contents(root, Format.DIRECTORY), env={}, labels={})
    image = an_image(name)
    finish(claimed(image), entry)
    then = time.time() - 2 * 86_400
    os.utime(store.folder / entry.digest / "manifest.json", (then, then))
    Image.objects.filter(pk=image.pk).update(built_at=timezone.now() - 2 * DAY)
    image.refresh_from_db()
    return image
