"""Which pictures models are shown, told by their data and not by what somebody calls it."""

from __future__ import annotations

import io
import zlib
from typing import Literal

import imagesize

from rollouts.llm.types import ChatMessage
from sandboxes.protocol import Picture

PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
# A few bytes can claim any size, and a server unpacks it before it makes the picture smaller. Photographs have half of it.
MAX_PIXELS = 32_000_000
# A JPEG says its size after its other headers. Millions of tiny ones would be read one by one, and everything else would wait.
_MAX_READS = 4096
_SMALL_SIDE = 64  # pixels; some image processors refuse smaller pictures


def type_of(data: bytes) -> str | None:
    """The MIME type of a picture's data, one of `PICTURE_TYPES`; None when it is none of them."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return "image/gif" if data.startswith((b"GIF87a", b"GIF89a")) else None


def picture_of(data: bytes) -> Picture:
    """The picture that these bytes are. Raises ValueError when models are not shown such, and says why."""
    mime = type_of(data)
    if mime is None:
        raise ValueError(f"the data is of none of the types {', '.join(PICTURE_TYPES)}")
    width, height = imagesize.get(_Beginning(data), exif_rotation=False)
    if width < 1 or height < 1:
        raise ValueError(f"the data begins as {mime} does, but does not say how large the picture is")
    if width * height > MAX_PIXELS:
        raise ValueError(f"the picture has {width} x {height} pixels, and at most {MAX_PIXELS} are shown; make it smaller")
    return Picture(mime, data)


class _Beginning(io.BytesIO):
    """Data of which only so many pieces are read."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > _MAX_READS:
            raise ValueError("too many headers")
        return super().read(size)


def picture_message(text: str, *pictures: Picture, role: Literal["user", "tool"] = "user") -> ChatMessage:
    """A text and the pictures that come after it; without pictures, a message of text."""
    if not pictures:
        return {"role": role, "content": text}
    shown = ({"type": "picture", "picture": picture} for picture in pictures)
    return {"role": role, "content": text, "parts": [{"type": "text", "text": text}, *shown]}


def _grey_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = _SMALL_SIDE.to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))  # 8 bits each of red, green and blue
    rows = (b"\0" + b"\x80" * 3 * _SMALL_SIDE) * _SMALL_SIDE
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


SMALL_PICTURE = Picture("image/png", _grey_png())
"""What every server is shown at its registration, if it takes pictures at all."""
