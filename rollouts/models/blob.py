"""Content too large for a row: kept once, compressed, in Django's storage `blobs`, under the digest of what it is."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any, ClassVar

from django.core.files.storage import Storage, storages
from django.db import models
from django.utils import timezone

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class BlobUnreadable(Exception):
    """The storage does not give back what was stored. The message names the blob."""


class Blob(models.Model):
    """A row exists only while its file is whole, and no two rows ever share a file name (see `rollouts.services.blobs`)."""

    class Encoding(models.TextChoices):
        ZSTD = "zstd", "zstd"
        IDENTITY = "identity", "as it is: it would not have become smaller"

    sha256 = models.CharField(max_length=64, primary_key=True, help_text="Of the content before compression, in hex.")
    file = models.CharField(max_length=120, unique=True, help_text="Its name in the storage.")
    size = models.BigIntegerField(help_text="Bytes of content.")
    stored_size = models.BigIntegerField(help_text="Bytes in the storage.")
    encoding = models.CharField(max_length=10, choices=Encoding.choices)
    created_at = models.DateTimeField(default=timezone.now)
    touched_at = models.DateTimeField(default=timezone.now, help_text="When it was last stored, again or for the first time.")

    class Meta:
        ordering: ClassVar = ["sha256"]

    def __str__(self) -> str:
        return self.sha256

    @classmethod
    def encode(cls, content: bytes) -> tuple[Encoding, bytes]:
        """How content lies in the storage, and the bytes there."""
        compressed = zstd.compress(content)
        return (cls.Encoding.ZSTD, compressed) if len(compressed) < len(content) else (cls.Encoding.IDENTITY, content)

    def content(self) -> bytes:
        """The whole content. Raises `BlobUnreadable` when the storage fails or what it has is not what was stored."""
        try:
            with blob_storage().open(self.file) as file:
                stored = file.read()
        except Exception as error:  # each storage has exceptions of its own
            raise BlobUnreadable(f"blob {self.sha256} cannot be read: {error}") from error
        try:
            content: bytes = zstd.decompress(stored) if self.encoding == self.Encoding.ZSTD else stored
        except zstd.ZstdError as error:
            raise BlobUnreadable(f"blob {self.sha256} is damaged: {error}") from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise BlobUnreadable(f"blob {self.sha256} is damaged: its content has another digest")
        return content

    def text(self) -> str:
        """The content of a blob that was made of text."""
        return self.content().decode()

    def json(self) -> Any:
        """The content of a blob that was made of a JSON value."""
        return json.loads(self.content())


def blob_storage() -> Storage:
    """Django's storage for blobs."""
    return storages["blobs"]
