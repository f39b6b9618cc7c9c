"""How the scripted model sees: `<picture>` in a prompt becomes a frame with as many `<picture>`s in it as its data says."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence

from rollouts.llm.pictures import type_of
from rollouts.llm.scripted.errors import BadRequest
from rollouts.llm.scripted.sequences import Given, Place
from rollouts.llm.scripted.tokenizer import FRAME, PICTURE, Tokenizer

_END_OF_PNG = b"IEND\xaeB`\x82"


def picture_id(tokenizer: Tokenizer) -> int:
    """The id that stands for one picture until the server expands it."""
    (token,) = tokenizer.encode(PICTURE)
    return token


def load(url: str) -> bytes:
    """A picture's data, out of its data: URL. Raises `BadRequest`: nothing is fetched."""
    head, _, data = url.partition(",")
    if not head.startswith("data:"):
        raise BadRequest(f"Cannot connect to host of {url}", status=500)
    try:
        picture = base64.b64decode(data, validate=True)
    except binascii.Error as exc:
        raise BadRequest(f"Failed to load image: {exc}") from exc
    if type_of(picture) is None:
        raise BadRequest("Failed to load image: cannot identify image file <_io.BytesIO object>")
    if picture[12:16] == b"IHDR" and not picture.endswith(_END_OF_PNG):
        raise BadRequest("Failed to load image: image file is truncated")
    return picture


def expand(tokenizer: Tokenizer, ids: Sequence[int], pictures: Sequence[bytes], *, otherwise: bool = False) -> Given:
    """The ids that the model gets for `ids`, in which one id stands for each picture; what is left of these ids is text.

    With `otherwise` a picture becomes one id more. Raises `BadRequest` when there is no id for a picture.
    """
    stands_for_one, (frame,) = picture_id(tokenizer), tokenizer.encode(FRAME)
    given: list[int] = []
    places: list[Place] = []
    for token in ids:
        if token == stands_for_one and len(places) < len(pictures):
            data = pictures[len(places)]
            inner = 1 + zlib.crc32(data) % 8 + otherwise
            places.append(Place(len(given), 2 + inner, data))
            given += [frame, *[stands_for_one] * inner, frame]
        else:
            given.append(token)
    if len(places) < len(pictures):
        raise BadRequest(f"Failed to apply prompt replacement for mm_items['image'][{len(places)}]", status=500)
    return Given(given, tuple(places))
