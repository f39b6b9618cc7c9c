"""Pictures in tasks and prompts. A task is JSON, so that a picture is base64 there."""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

from rollouts.llm.pictures import picture_message, picture_of
from sandboxes.protocol import Picture

__all__ = ["Picture", "TaskPicture", "picture_message", "picture_of"]


def _read(value: object) -> Picture:
    if not isinstance(value, str):
        raise ValueError("give the picture's data in base64, as a string")
    try:
        data = base64.b64decode(value, validate=True)
    except ValueError as error:
        raise ValueError("this is not base64; give the picture's data and nothing before it, such as `data:`") from error
    return picture_of(data)


_SCHEMA = {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/*"}
# A field of a task's payload: base64 there, a `Picture` in the environment. What models are not shown is refused.
TaskPicture = Annotated[Picture, PlainValidator(_read), WithJsonSchema(_SCHEMA)]
