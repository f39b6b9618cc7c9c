"""Apptainer's image files (SIF): where the root file system is in them, and making one. No Django.

A SIF file is a header, a table of descriptors and the data objects that these describe; the root file system is the object
called the primary system partition, and nearly always squashfs. All numbers are little endian.
"""

from __future__ import annotations

import platform
import shutil
import struct
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_LAUNCH = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0")
_MAGIC, _VERSION = b"SIF_MAGIC\0", b"01\0"
_HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")  # ..., created, modified, free and all descriptors, and where the parts are
_DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
_PARTITION = struct.Struct("<ii3s")  # the start of a partition's descriptor's last field: file system, kind, architecture
_ARCHITECTURES = {"i686": b"01\0", "x86_64": b"02\0", "armv7l": b"03\0", "aarch64": b"04\0", "ppc64le": b"06\0"}

_IS_PARTITION = 0x4004
_SQUASHFS = 1
_PRIMARY = 2
_GROUP = 0xF0000000 | 1
_MOST_DESCRIPTORS = 4096
_ALIGNMENT = 4096  # of the data objects, for file systems to be mounted from where they are


class NotSif(ValueError):
    """The file is no SIF file that a root file system can be read from; the message names it and says why."""


@dataclass(frozen=True)
class Partition:
    """The squashfs file system in a SIF file, in bytes."""

    offset: int
    size: int


def root_partition(path: Path) -> Partition:
    """Raises NotSif, OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        for datatype, used, *_, offset, length, _, _, _, _, _, _, extra in _descriptors(file, path):
            if not used or datatype != _IS_PARTITION:
                continue
            file_system, kind, _ = _PARTITION.unpack_from(extra)
            if kind != _PRIMARY:
                continue
            if file_system != _SQUASHFS:
                raise NotSif(f"{path}: its root file system is not squashfs (number {file_system}), or is encrypted")
            if not 0 < offset <= offset + length <= size:
                raise NotSif(f"{path}: it is cut off")
            return Partition(offset, length)
    raise NotSif(f"{path}: it has no root file system")


def write_sif(squashfs: Path, target: Path) -> None:
    """Make `target` a SIF file with the given root file system, for this machine's architecture. Raises OSError, KeyError."""
    architecture = _ARCHITECTURES[platform.machine()]
    now, size = int(time.time()), squashfs.stat().st_size
    extra = _PARTITION.pack(_SQUASHFS, _PRIMARY, architecture).ljust(384, b"\0")
    descriptor = _DESCRIPTOR.pack(
        _IS_PARTITION, True, 1, _GROUP, 0, _ALIGNMENT, size, size, now, now, 0, 0, b"root".ljust(128, b"\0"), extra
    )
    table = _HEADER.size
    header = _HEADER.pack(
        *(_LAUNCH, _MAGIC, _VERSION, architecture, uuid.uuid4().bytes, now, now),
        *(0, 1, table, _DESCRIPTOR.size, _ALIGNMENT, size),
    )
    with squashfs.open("rb") as source, target.open("wb") as file:
        file.write((header + descriptor).ljust(_ALIGNMENT, b"\0"))
        shutil.copyfileobj(source, file, 1 << 20)


def _descriptors(file: BinaryIO, path: Path) -> Iterator[tuple[Any, ...]]:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise NotSif(f"{path}: it is too short for a SIF file")
    _, magic, version, _, _, _, _, _, total, offset, _, _, _ = _HEADER.unpack(header)
    if magic != _MAGIC or version != _VERSION:
        raise NotSif(f"{path}: it is not a SIF file of version 01")
    if not 0 <= total <= _MOST_DESCRIPTORS or offset < _HEADER.size:
        raise NotSif(f"{path}: its header makes no sense")
    file.seek(offset)
    table = file.read(total * _DESCRIPTOR.size)
    for start in range(0, len(table) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
        yield _DESCRIPTOR.unpack_from(table, start)
