"""Small archives and container images, crafted by the tests of images."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandboxes.images.layers import own_architecture

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {
    "none": lambda data: data,
    "gzip": lambda data: gzip.compress(data),
    "zstd": lambda data: zstd.compress(data),
    "xz": lambda data: lzma.compress(data),
}


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A directory that any user can go to, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="prorl-images-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


class Tar:
    """A tar archive in the making."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._bytes, mode="w")

    def add(self, name: str, data: bytes = b"", **fields: Any) -> Tar:
        """`fields` are those of a TarInfo: type, linkname, mode …"""
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = len(data), 0o644, 1_000_000_000
        for key, value in fields.items():
            setattr(info, key, value)
        self._tar.addfile(info, io.BytesIO(data))
        return self

    def directory(self, name: str, mode: int = 0o755) -> Tar:
        return self.add(name, type=tarfile.DIRTYPE, mode=mode)

    def link(self, name: str, target: str) -> Tar:
        return self.add(name, type=tarfile.SYMTYPE, linkname=target)

    def hard_link(self, name: str, target: str) -> Tar:
        return self.add(name, type=tarfile.LNKTYPE, linkname=target)

    def data(self) -> bytes:
        self._tar.close()
        return self._bytes.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def image_config(layers: Sequence[bytes], **more: Any) -> bytes:
    """`layers` as they are when they are not compressed."""
    document = {
        "architecture": own_architecture(),
        "config": {"Env": ["PATH=/opt/bin:/usr/bin", "GREETING=hello=you"], "Labels": {"made-by": "a test"}},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
    }
    return json.dumps(document | more).encode()


def docker_archive(path: Path, layers: Sequence[bytes], *, tag: str = "busy:1", compress: str = "none", **config: Any) -> Path:
    """What `docker save` writes; each layer compressed, too."""
    stored = [COMPRESSIONS[compress](layer) for layer in layers]
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    tar = Tar()
    for name, data in zip(names, stored, strict=True):
        tar.add(name, data)
    tar.add("config.json", image_config(layers, **config))
    tar.add("manifest.json", json.dumps([{"Config": "config.json", "RepoTags": [tag], "Layers": names}]).encode())
    path.write_bytes(tar.data())
    return path


def oci_layout(folder: Path, layers: Sequence[bytes], *, compress: str = "gzip", name: str = "", nested: bool = False) -> Path:
    """An OCI image layout; `nested` puts the image below an index of two architectures."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def store(data: bytes, media_type: str) -> dict[str, Any]:
        digest = digest_of(data)
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    descriptors = [store(COMPRESSIONS[compress](layer), "application/vnd.oci.image.layer.v1.tar") for layer in layers]
    config = store(image_config(layers), "application/vnd.oci.image.config.v1+json")
    document = {"schemaVersion": 2, "config": config, "layers": descriptors}
    manifest = store(json.dumps(document).encode(), "application/vnd.oci.image.manifest.v1+json")
    if nested:
        other = {**manifest, "platform": {"architecture": "s390x"}}
        own = {**manifest, "platform": {"architecture": own_architecture()}}
        index = {"schemaVersion": 2, "manifests": [other, own]}
        manifest = store(json.dumps(index).encode(), "application/vnd.oci.image.index.v1+json")
    if name:
        manifest["annotations"] = {"org.opencontainers.image.ref.name": name}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder
