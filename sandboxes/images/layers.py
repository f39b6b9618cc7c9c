"""Container images: from a manifest, its configuration and its layers to a root file system. No Django."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple

from sandboxes.images.errors import BadSource
from sandboxes.images.job import Job, Made
from sandboxes.images.states import Format
from sandboxes.images.streams import Watched, decompressed

_LARGEST_DOCUMENT = 16 * 1024 * 1024
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Layer(NamedTuple):
    """`open` gives it as stored, `size` bytes; `digest` is of that, "" where nobody said."""

    name: str
    size: int
    open: Callable[[], AbstractContextManager[IO[bytes]]]
    digest: str = ""


def own_architecture() -> str:
    """This machine's, as container images call it."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


async def unpack_layers(job: Job, config: Mapping[str, Any], layers: Sequence[Layer]) -> Made:
    """The root file system of an image, and what its configuration says about it. Raises BadSource."""
    architecture = config.get("architecture") or own_architecture()
    if architecture != own_architecture():
        raise BadSource(f"the image is for {architecture}; this node is {own_architecture()}")
    diff_ids = (config.get("rootfs") or {}).get("diff_ids") or []
    if len(diff_ids) != len(layers):
        raise BadSource(f"the image has {len(layers)} layers, and its configuration names {len(diff_ids)}")
    root = job.workspace / "rootfs"
    unpacker = job.unpacker(root)
    total = sum(layer.size for layer in layers) or 1
    before = 0
    for number, (layer, diff_id) in enumerate(zip(layers, diff_ids, strict=True), start=1):
        job.step(f"unpacking layer {number} of {len(layers)}", before / total, (before + layer.size) / total)

        def unpack(layer: Layer = layer, diff_id: str = diff_id) -> None:
            with layer.open() as raw:
                stored = Watched(raw, job.meter(layer.size))
                contents = Watched(decompressed(stored))
                unpacker.extract(contents, what=f"layer {layer.name}", layer=True)
                _expect(contents.hexdigest(), diff_id, f"layer {layer.name}")
                _expect(stored.hexdigest(), layer.digest, f"layer {layer.name}")

        await job.in_thread(unpack)
        before += layer.size
    if unpacker.skipped:
        job.say(f"{unpacker.skipped} device nodes and the like were left out")
    settings = config.get("config") or {}
    variables = dict(item.split("=", 1) for item in settings.get("Env") or [] if "=" in item)
    return Made(root, Format.DIRECTORY, variables, {str(k): str(v) for k, v in (settings.get("Labels") or {}).items()})


def parse(data: bytes, what: str) -> Any:
    """A JSON document of the image. Raises BadSource."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise BadSource(f"{what} is not JSON: {error}") from error


def read_document(stream: IO[bytes], what: str, digest: str = "") -> Any:
    """A JSON document of the image, of that digest. Raises BadSource."""
    data = stream.read(_LARGEST_DOCUMENT + 1)
    if len(data) > _LARGEST_DOCUMENT:
        raise BadSource(f"{what} is larger than {_LARGEST_DOCUMENT} bytes")
    _expect(hashlib.sha256(data).hexdigest(), digest, what)
    return parse(data, what)


def blob_path(digest: str) -> str:
    """Where a blob lies in an OCI image layout. Raises BadSource for a digest of another kind."""
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise BadSource(f"{digest!r} is no SHA-256 digest")
    return f"blobs/sha256/{value}"


def file_identity(path: Path) -> str:
    """What tells one state of a file from another. Raises BadSource."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadSource(f"{path} is no file")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadSource(f"{path} cannot be read: {error.strerror}") from error


def _expect(found: str, digest: str, what: str) -> None:
    if digest and f"sha256:{found}" != digest:
        raise BadSource(f"{what} is damaged: it has the digest sha256:{found}, and {digest} was promised")
