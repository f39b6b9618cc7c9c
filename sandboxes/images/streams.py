"""Compressed streams, told apart by their first bytes, and what is counted and hashed on the way. No Django."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_CHUNK = 1 << 20

# What reading a damaged stream raises.
DAMAGED = (EOFError, lzma.LZMAError, zstd.ZstdError, OSError, ValueError)


class Readable(Protocol):
    """All that is needed of a stream that is read forwards."""

    def read(self, size: int = -1, /) -> bytes: ...


def decompressed(raw: Readable) -> Readable:
    """What `raw` holds, whether it is compressed (gzip, zstd, xz, bzip2) or not. Read from where it stands, forwards only."""
    beginning = raw.read(6)
    whole = cast(IO[bytes], _Put(beginning, raw))
    for magic, opened in _FORMATS:
        if beginning.startswith(magic):
            return opened(whole)
    return whole


_FORMATS: tuple[tuple[bytes, Callable[[IO[bytes]], Readable]], ...] = (
    (b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    (b"\x28\xb5\x2f\xfd", lambda raw: zstd.ZstdFile(raw)),
    (b"\xfd7zXZ\x00", lambda raw: lzma.LZMAFile(raw)),  # noqa: SIM115 - the caller's stream is the caller's to close
    (b"BZh", lambda raw: bz2.BZ2File(raw)),
)


def is_compressed(path: Path) -> bool:
    """Whether a file is of one of the kinds that `decompressed` knows. Raises OSError."""
    with path.open("rb") as file:
        beginning = file.read(6)
    return any(beginning.startswith(magic) for magic, _ in _FORMATS)


class _Put:
    """A stream whose first bytes were read, and are put back."""

    def __init__(self, beginning: bytes, rest: Readable) -> None:
        self._beginning = beginning
        self._rest = rest

    def read(self, size: int = -1, /) -> bytes:
        if not self._beginning:
            return self._rest.read(size)
        if size < 0:
            data, self._beginning = self._beginning, b""
            return data + self._rest.read()
        data, self._beginning = self._beginning[:size], self._beginning[size:]
        return data


class Watched:
    """A stream that is read once: `on_read` is told of the bytes that pass, `hexdigest` is of those that have passed."""

    def __init__(self, raw: Readable, on_read: Callable[[int], None] = lambda n: None) -> None:
        self._raw = raw
        self._on_read = on_read
        self._hash = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        data = self._raw.read(size)
        self._hash.update(data)
        self._on_read(len(data))
        return data

    def hexdigest(self) -> str:
        """SHA-256 of the whole stream: what was not read yet is read now."""
        while self.read(_CHUNK):
            pass
        return self._hash.hexdigest()
