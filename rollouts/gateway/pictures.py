"""Reading the pictures that agents send, and the messages they stand in. They come with the request: nothing is fetched."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Any

from rollouts.gateway.errors import CallRefused, refuse
from rollouts.gateway.fields import Fields
from rollouts.llm.messages import PICTURE_PART
from rollouts.llm.pictures import picture_of
from rollouts.llm.types import ChatMessage

MAX_PICTURES = 100  # in one request; how large they are together is bounded by its body

_URL_SAFE = str.maketrans("-_", "+/")  # Google's clients write base64 so
_ALSO_CALLED = {"image/jpg": "image/jpeg"}

Part = dict[str, Any]
"""A part of a message, as `ChatMessage.parts` has it."""


class PictureReader:
    """Reads those of one request. `first` is the field of the first one, empty while there is none."""

    def __init__(self) -> None:
        self.first = ""
        self._count = 0

    def from_url(self, fields: Fields, name: str) -> Part:
        """The picture whose data is all in a `data:` URL. Raises `CallRefused` for any other."""
        scheme, _, rest = fields.text(name).partition(":")
        if scheme.lower() != "data":
            raise fields.refuse(name, "nothing is fetched from the web: send the picture itself, as a data: URL")
        head, comma, data = rest.partition(",")
        mime, *parameters = head.split(";")
        if not comma or parameters[-1:] != ["base64"]:
            raise fields.refuse(name, "must be data:TYPE;base64,DATA")
        place = fields.place(name)
        return self._part(data, place, mime, place)

    def from_base64(self, fields: Fields, data: str, mime: str) -> Part:
        """The picture of which two fields tell the data, in base64, and the type. Raises `CallRefused`."""
        return self._part(fields.text(data), fields.place(data), fields.text(mime), fields.place(mime))

    def _part(self, data: str, data_place: str, mime: str, mime_place: str) -> Part:
        self._count += 1
        if self._count > MAX_PICTURES:
            raise refuse(data_place, f"is more than the {MAX_PICTURES} pictures that a request may have")
        try:
            raw = binascii.a2b_base64(data.translate(_URL_SAFE), strict_mode=True)
        except ValueError as exc:
            raise refuse(data_place, f"is not base64: {exc}") from exc
        try:
            picture = picture_of(raw)
        except ValueError as exc:
            raise refuse(data_place, str(exc)) from exc
        mime = mime.strip().lower()
        if _ALSO_CALLED.get(mime, mime) != picture.mime:
            raise refuse(mime_place, f"says {mime[:100]!r}, but the data is of the type {picture.mime}")
        self.first = self.first or data_place
        return {"type": PICTURE_PART, "picture": picture}


def misplaced(part: Fields, name: str = "type") -> CallRefused:
    """The error to raise about a picture in any other message."""
    return part.refuse(name, "a picture may only stand in a message of the user or in the result of a tool")


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def text_of(parts: Sequence[Part]) -> str:
    """What of these parts is text."""
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def with_parts(message: ChatMessage, parts: Sequence[Part]) -> ChatMessage:
    """The message with this content. Where it is all text, it is one text to the chat template."""
    message["content"] = text_of(parts)
    if any(part["type"] == PICTURE_PART for part in parts):
        message["parts"] = list(parts)
    return message
