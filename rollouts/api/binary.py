"""Answers that are not text: data, and MessagePack with token arrays as they are in memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgpack
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.utils.encoders import JSONEncoder

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class DataRenderer(JSONRenderer):
    """Lets clients ask for data by `Accept`. What it renders are the problems of requests that get none."""

    media_type = "application/octet-stream"
    format = "data"


class PictureRenderer(DataRenderer):
    """The same for pictures, by any of their types."""

    media_type = "image/*"
    format = "picture"


class MsgpackRenderer(BaseRenderer):
    """Of answers. Problems stay JSON, as everywhere."""

    media_type = "application/msgpack"
    format = "msgpack"
    charset = None
    render_style = "binary"

    def render(
        self, data: Any, accepted_media_type: str | None = None, renderer_context: Mapping[str, Any] | None = None
    ) -> bytes:
        if _is_problem(renderer_context):
            return JSONRenderer().render(data)
        packed: bytes = msgpack.packb(data, default=JSONEncoder().default)
        return packed


class CompressedMsgpackRenderer(MsgpackRenderer):
    """The same in one frame of Zstandard, for networks that are slower than compressing."""

    media_type = "application/msgpack+zstd"
    format = "msgpack-zstd"

    def render(
        self, data: Any, accepted_media_type: str | None = None, renderer_context: Mapping[str, Any] | None = None
    ) -> bytes:
        rendered = super().render(data, accepted_media_type, renderer_context)
        return rendered if _is_problem(renderer_context) else zstd.compress(rendered, level=1)


def _is_problem(renderer_context: Mapping[str, Any] | None) -> bool:
    response = (renderer_context or {}).get("response")
    return response is not None and response.exception
