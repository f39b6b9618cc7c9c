"""Which pictures models are shown, told by how their data begins and not by what somebody calls it."""

from __future__ import annotations

from sandboxes.protocol import Picture

PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


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
    """The picture that these bytes are. Raises ValueError when models are not shown such."""
    mime = type_of(data)
    if mime is None:
        raise ValueError(f"it is no picture that models are shown: its data is that of none of {', '.join(PICTURE_TYPES)}")
    return Picture(mime, data)
