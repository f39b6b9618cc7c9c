"""Images and their builds, to look at. They belong to the installation, not to a project."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import QuerySet

from sandboxes.images.states import UNFINISHED
from sandboxes.models import Image, ImageBuild

MOST_BUILDS = 20


def images() -> QuerySet[Image]:
    return Image.objects.all()


def find_image(name: str) -> Image | None:
    return Image.objects.filter(name=name).first()


def builds_of(image: Image) -> list[ImageBuild]:
    """The newest builds, newest first."""
    return list(ImageBuild.objects.filter(image=image).order_by("-number")[:MOST_BUILDS])


def unfinished_build(image: Image) -> ImageBuild | None:
    return ImageBuild.objects.filter(image=image, state__in=UNFINISHED).first()


def unfinished_builds() -> dict[int, ImageBuild]:
    """By the id of the image."""
    return {build.image_id: build for build in ImageBuild.objects.filter(state__in=UNFINISHED)}


def names_of(digests: Iterable[str]) -> dict[str, str]:
    """The images that have what these digests name, several with commas; a digest that none has any more is left out."""
    names: dict[str, list[str]] = {}
    wanted = {digest for digest in digests if digest}
    for name, digest in Image.objects.filter(digest__in=wanted).order_by("name").values_list("name", "digest"):
        names.setdefault(digest, []).append(name)
    return {digest: ", ".join(found) for digest, found in names.items()}
