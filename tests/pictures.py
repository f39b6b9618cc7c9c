"""Pictures of one colour, made without a picture library."""

from __future__ import annotations

import struct
import zlib

from sandboxes.protocol import Picture


def png(width: int, height: int, colour: tuple[int, int, int]) -> Picture:
    """A PNG of so many pixels, its colour in red, green and blue up to 255."""
    row = b"\x00" + bytes(colour) * width  # 0: not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(row * height)) + _chunk(b"IEND", b"")
    return Picture("image/png", b"\x89PNG\r\n\x1a\n" + chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
