"""The wire format between the host and the broker, shared by both ends.

A frame is

    length   4 bytes, big endian: the size of all that follows, at most MAX_FRAME
    header   4 bytes of length (big endian), then at most MAX_HEADER bytes of JSON: one object
    payload  the rest: raw bytes (a file's contents, a command's output)

The host sends requests `{"id": 7, "verb": "bash", ...}`; ids are its own choice, unique among its pending requests. The broker
answers each with `{"id": 7, ...}` or `{"id": 7, "failure": {"kind": ..., "message": ...}}`, in any order. Failures are of kind

    invalid    the request is malformed or impossible
    input      the terminal cannot take all that was typed
    file       a file verb failed; `reason` as in `sandboxes.errors.SandboxFileError`
    cancelled  by the host
    unusable   the sandbox cannot serve it any more

`{"id": 7, "verb": "cancel"}` ends a pending request, which is then answered with a failure of kind "cancelled". Verbs that
stream exchange frames `{"id": 7, "more": true, ...}` in either direction between the request and its answer. Of both, those
with unknown ids are ignored, because the answer may have crossed them. Anything else closes that connection and no other.

`{"id": 0, "failure": {"kind": "limit", "limit": ..., "message": ...}}` comes unasked and is the last frame: the broker has
ended everything inside because a limit was exceeded that no single command could be ended for.
"""

from __future__ import annotations

import struct

from .lean import from_json, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

MAX_FRAME = 64 * 1024 * 1024
MAX_HEADER = 64 * 1024
MAX_PAYLOAD = MAX_FRAME - MAX_HEADER - 4

# Of files in pieces, see `transfers`.
TRANSFER_PIECE = 1024 * 1024
TRANSFER_WINDOW = 4  # pieces on their way

# Of forwarded ports, see `forward`.
MAX_STREAMS = 64
STREAM_WINDOW = 128 * 1024
STREAM_CHUNK = 64 * 1024

_LENGTHS = struct.Struct("!II")
_LENGTH = struct.Struct("!I")


class FrameError(Exception):
    """The peer sent bytes that are no frame; nothing after them can be understood."""


def encode(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """One frame. Raises FrameError when it would exceed MAX_FRAME or MAX_HEADER."""
    head = to_json(header)
    length = _LENGTH.size + len(head) + len(payload)
    if length > MAX_FRAME or len(head) > MAX_HEADER:
        raise FrameError(f"a frame of {length} bytes exceeds {MAX_FRAME}, or its header of {len(head)} bytes {MAX_HEADER}")
    return b"".join((_LENGTHS.pack(length, len(head)), head, payload))


class FrameReader:
    """Cuts a byte stream into frames; feed it what arrives."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._max_frame = max_frame

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield each frame completed by `data` as (header, payload). Raises FrameError; the reader is useless after that."""
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            length, head_length = _LENGTHS.unpack_from(self._buffer)
            if length > self._max_frame or head_length > min(MAX_HEADER, length - _LENGTH.size):
                raise FrameError(f"bad frame lengths {length} and {head_length}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            head_end = _LENGTHS.size + head_length
            try:
                header = from_json(bytes(self._buffer[_LENGTHS.size : head_end]))
            except (ValueError, RecursionError) as error:
                raise FrameError(f"bad frame header: {error}") from None
            if not isinstance(header, dict):
                raise FrameError("frame header is not an object")
            payload = bytes(memoryview(self._buffer)[head_end:end])
            del self._buffer[:end]
            yield header, payload
