"""What `docker save` and `podman save` write: a tar archive of one or more images, perhaps compressed. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from sandboxes.images.errors import BadSource
from sandboxes.images.job import Job, Made
from sandboxes.images.layers import Layer, file_identity, read_document, unpack_layers

from .base import FileSettings, Source, bytes_below
from .files import Files, opened_files


class DockerArchiveSettings(FileSettings):
    reference: str = Field("", max_length=300, description="Which image, where the archive holds several: its name and tag.")


class DockerArchive(Source):
    kind: ClassVar[str] = "docker_archive"
    settings: ClassVar[type[DockerArchiveSettings]] = DockerArchiveSettings
    example: ClassVar[Mapping[str, Any]] = {"path": "/data/archives/swe.tar", "reference": "swe:1"}

    def identity(self, settings: DockerArchiveSettings) -> str:
        return file_identity(Path(settings.path))

    def space(self, settings: DockerArchiveSettings) -> int:
        return 4 * bytes_below(Path(settings.path))

    async def make(self, settings: DockerArchiveSettings, job: Job) -> Made:
        async with opened_files(job, Path(settings.path)) as files:
            if "manifest.json" not in files:
                raise BadSource(f"{settings.path} is no docker archive: it has no manifest.json. OCI archives are of kind oci")
            return await _make(files, settings.reference, job)


async def _make(files: Files, reference: str, job: Job) -> Made:
    image = _choose(files, reference)
    with files.open(image["Config"]) as file:
        config = read_document(file, "the image's configuration")
    if not isinstance(config, dict):
        raise BadSource("the image's configuration is no JSON object")
    layers = [
        Layer(name=name, size=files.size(name), open=partial(files.open, name))  # checked by the config's digests
        for name in image["Layers"]
    ]
    return await unpack_layers(job, config, layers)


def _choose(files: Files, reference: str) -> dict[str, Any]:
    with files.open("manifest.json") as file:
        images = read_document(file, "manifest.json")
    if not isinstance(images, list) or not all(_is_image(image) for image in images):
        raise BadSource("manifest.json is damaged: it is no list of images with Config and Layers")
    chosen = [image for image in images if not reference or reference in (image.get("RepoTags") or [])]
    if len(chosen) != 1:
        tags = ", ".join(tag for image in images for tag in image.get("RepoTags") or []) or "none with a name"
        raise BadSource(f"{len(chosen) or 'no'} images could be meant; say which by `reference`. There are: {tags}")
    return dict(chosen[0])


def _is_image(image: Any) -> bool:
    if not isinstance(image, dict) or not isinstance(image.get("Config"), str):
        return False
    layers = image.get("Layers")
    return isinstance(layers, list) and all(isinstance(name, str) for name in layers)
