"""What an image can be made from, one module each. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from sandboxes.images.errors import FieldProblem, ImageRefused

from .base import Source, SourceSettings
from .debian import Debian
from .definition import Definition
from .docker_archive import DockerArchive
from .oci import Oci
from .python import Python
from .sif import Sif
from .tarball import Tarball
from .virtualenv import Virtualenv

KINDS: Mapping[str, Source] = {
    source.kind: source for source in (DockerArchive(), Oci(), Sif(), Definition(), Tarball(), Debian(), Python(), Virtualenv())
}


def parse_settings(kind: str, document: Mapping[str, Any]) -> SourceSettings:
    """The settings of a kind of source. Raises ImageRefused, naming every field that is wrong."""
    source = KINDS.get(kind)
    if source is None:
        raise ImageRefused(FieldProblem("/kind", f"There is no kind {kind!r}; there are {', '.join(KINDS)}."))
    try:
        return source.settings.model_validate(document)
    except ValidationError as error:
        raise ImageRefused(*(FieldProblem(_pointer(item["loc"]), _sentence(item)) for item in error.errors())) from error


def _pointer(location: tuple[int | str, ...]) -> str:
    return "/source" + "".join(f"/{step}" for step in location)


def _sentence(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return "There is no such setting."
    if item["type"] == "missing":
        return "This setting is required."
    return f"{item['msg'].removeprefix('Value error, ')}."
