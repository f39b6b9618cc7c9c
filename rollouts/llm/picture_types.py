"""The types of pictures that models are shown, known by how their data begins and not by what anybody says of it."""

from __future__ import annotations

PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")

_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


def picture_type(data: bytes) -> str | None:
    """The MIME type of this data: one of `PICTURE_TYPES`, or None when it is none of them."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":  # with its length in between
        return "image/webp"
    return next((mime for beginning, mime in _BEGINNINGS.items() if data.startswith(beginning)), None)
