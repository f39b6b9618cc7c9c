"""An OCI image layout, in a directory or a tar archive (`skopeo copy … oci:DIR`, `buildah push … oci-archive:FILE`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from sandboxes.images.errors import BadSource
from sandboxes.images.job import Job, Made
from sandboxes.images.layers import Layer, blob_path, file_identity, own_architecture, read_document, unpack_layers

from .base import FileSettings, Source, bytes_below
from .files import Files, opened_files

_REFERENCE = "org.opencontainers.image.ref.name"
_INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_DEEPEST = 4


class OciSettings(FileSettings):
    reference: str = Field("", max_length=300, description="Which image, where the layout holds several: its tag.")


class Oci(Source):
    kind: ClassVar[str] = "oci"
    settings: ClassVar[type[OciSettings]] = OciSettings
    example: ClassVar[Mapping[str, Any]] = {"path": "/data/archives/swe", "reference": "1"}

    def identity(self, settings: OciSettings) -> str:
        path = Path(settings.path)
        return file_identity(path / "index.json" if path.is_dir() else path)  # which names all else by digest

    def space(self, settings: OciSettings) -> int:
        return 4 * bytes_below(Path(settings.path))

    async def make(self, settings: OciSettings, job: Job) -> Made:
        async with opened_files(job, Path(settings.path)) as files:
            if "index.json" not in files:
                raise BadSource(f"{settings.path} is no OCI image layout: it has no index.json")
            return await _make(files, settings.reference, job)


async def _make(files: Files, reference: str, job: Job) -> Made:
    """The image of that tag, or the only one, for this machine's architecture."""
    with files.open("index.json") as file:
        index = read_document(file, "index.json")
    manifest = _document(files, _choose(files, index, reference)["digest"])
    layers = [
        Layer(
            name=item["digest"][:19],
            size=files.size(path := blob_path(item["digest"])),
            open=partial(files.open, path),
            digest=item["digest"],
        )
        for item in _list(manifest, "layers")
    ]
    config = manifest.get("config")
    if not isinstance(config, dict) or "digest" not in config:
        raise BadSource("the image's manifest names no configuration")
    return await unpack_layers(job, _document(files, config["digest"]), layers)


def _choose(files: Files, index: Any, reference: str) -> dict[str, Any]:
    choices = _list(index, "manifests")
    if reference:
        names = [(item.get("annotations") or {}).get(_REFERENCE, "") for item in choices]
        choices = [item for item, name in zip(choices, names, strict=True) if name == reference]
        if not choices:
            raise BadSource(
                f"there is no image {reference!r}; there are: {', '.join(filter(None, names)) or 'none with a name'}"
            )
    for _ in range(_DEEPEST):
        if len(choices) > 1:
            choices = [item for item in choices if (item.get("platform") or {}).get("architecture") == own_architecture()]
        if len(choices) != 1:
            raise BadSource(
                f"{len(choices) or 'no'} images could be meant; say which by `reference`, one for {own_architecture()}"
            )
        if choices[0].get("mediaType") not in _INDEX_TYPES:
            return choices[0]
        choices = _list(_document(files, choices[0]["digest"]), "manifests")
    raise BadSource("the image's indexes are nested too deeply")


def _document(files: Files, digest: str) -> dict[str, Any]:
    with files.open(blob_path(digest)) as file:
        document = read_document(file, digest[:19], digest)
    if not isinstance(document, dict):
        raise BadSource(f"{digest[:19]} is no JSON object")
    return document


def _list(document: Any, name: str) -> list[dict[str, Any]]:
    """A list of descriptors; each has a digest."""
    items = document.get(name) if isinstance(document, dict) else None
    if not isinstance(items, list) or not all(isinstance(i, dict) and isinstance(i.get("digest"), str) for i in items):
        raise BadSource(f"the image's documents are damaged: {name!r} is no list of descriptors")
    return items
