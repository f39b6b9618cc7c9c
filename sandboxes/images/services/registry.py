"""Registering images, changing and removing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from sandboxes.images.errors import FieldProblem, ImageBusy, ImageRefused
from sandboxes.images.sources import parse_settings
from sandboxes.images.sources.base import BasedSettings
from sandboxes.images.states import UNFINISHED, Format
from sandboxes.models import Image, ImageBuild
from sandboxes.models.image import image_name_validator


def register_image(
    *, name: str, kind: str, source: Mapping[str, Any], format: str = Format.DIRECTORY.value, description: str = ""
) -> Image:
    """A new image, of which nothing is built yet. Raises ImageRefused, ImageBusy when the name is taken."""
    try:
        image_name_validator(name)
    except ValidationError as error:
        raise ImageRefused(FieldProblem("/name", error.messages[0])) from error
    if len(name) > 100:
        raise ImageRefused(FieldProblem("/name", "Use at most 100 characters."))
    values = {"kind": kind, "source": check_source(name=name, kind=kind, source=source), "format": check_format(format)}
    try:
        with transaction.atomic():
            return Image.objects.create(name=name, description=description, **values)
    except IntegrityError:
        raise ImageBusy(f"There is an image {name} already.") from None


def check_source(*, name: str, kind: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a source, complete. Raises ImageRefused, also for a base that is not there or builds upon this image."""
    settings = parse_settings(kind, source)
    base = settings.base if isinstance(settings, BasedSettings) else ""
    if base and base != name and not Image.objects.filter(name=base).exists():
        raise ImageRefused(FieldProblem("/source/base", f"There is no image {base!r}; register it first."))
    if base and name in _ancestry(base):
        raise ImageRefused(FieldProblem("/source/base", f"{base!r} builds upon this image itself."))
    return settings.model_dump(mode="json")


def check_format(format: str) -> str:
    """Raises ImageRefused."""
    try:
        return Format(format).value
    except ValueError:
        known = " or ".join(known.value for known in Format)
        raise ImageRefused(FieldProblem("/format", f"Must be {known}.")) from None


def base_of(image: Image) -> str:
    """Name of the image that it builds upon, or "": by the settings as stored, whether or not they still make sense."""
    return str(image.source.get("base", ""))


def remove_image(*, image: Image) -> None:
    """Forget an image; what was built of it stays in the store until it is pruned. Raises ImageBusy."""
    with transaction.atomic():
        Image.objects.select_for_update().filter(pk=image.pk).first()
        if ImageBuild.objects.filter(image=image, state__in=UNFINISHED).exists():
            raise ImageBusy(f"{image.name} is being built; cancel that first.")
        above = [other.name for other in Image.objects.exclude(pk=image.pk).order_by("name") if base_of(other) == image.name]
        if above:
            raise ImageBusy(f"{', '.join(above)} build upon {image.name}; remove them first.")
        image.delete()


def _ancestry(name: str) -> list[str]:
    """The image and those that it builds upon."""
    found: list[str] = []
    while name and name not in found:
        found.append(name)
        image = Image.objects.filter(name=name).first()
        name = base_of(image) if image else ""
    return found
