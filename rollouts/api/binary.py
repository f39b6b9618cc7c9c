"""MessagePack answers: token arrays as they are in memory, where JSON would need text for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.utils.encoders import JSONEncoder

MSGPACK = "application/msgpack"


class MsgpackRenderer(BaseRenderer):
    """Of answers. Problems stay JSON, as everywhere."""

    media_type = MSGPACK
    format = "msgpack"
    charset = None
    render_style = "binary"

    def render(
        self, data: Any, accepted_media_type: str | None = None, renderer_context: Mapping[str, Any] | None = None
    ) -> bytes:
        response = (renderer_context or {}).get("response")
        if response is not None and response.exception:
            return JSONRenderer().render(data)
        packed: bytes = msgpack.packb(data, default=JSONEncoder().default)
        return packed
