"""Names of the standard library that the broker needs before it can answer, from where they cost little to import.

Their public modules (json, signal, socket, contextlib, collections) make enumerations, regular expressions and classes that
are of no use here. That takes twice as long as Python itself takes to start, and a sandbox is not ready before. What they are
made of is the same in all versions since 3.9.
"""

from __future__ import annotations

__all__ = ["accepted", "deque", "from_json", "signal", "socket", "suppress", "to_json"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections import deque
    from contextlib import suppress
    from typing import Any

    encode_basestring_ascii: Any
    make_encoder: Any
    make_scanner: Any
else:
    import _signal as signal
    import _socket as socket
    from _collections import deque
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    class suppress:
        """`contextlib.suppress`."""

        def __init__(self, *kinds):
            self._kinds = kinds

        def __enter__(self):
            pass

        def __exit__(self, kind, error, traceback):
            return kind is not None and issubclass(kind, self._kinds)


class _Reading:
    """What a scanner asks for."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = parse_constant = float
    parse_int = int
    memo: dict[str, str] = {}


_scan = make_scanner(_Reading)
_encode = make_encoder(None, None, encode_basestring_ascii, None, ":", ",", False, False, True)


def to_json(value: Any) -> bytes:
    return "".join(_encode(value, 0)).encode()


def from_json(data: bytes) -> Any:
    """Raises ValueError, RecursionError."""
    text = data.decode()
    try:
        value, end = _scan(text, 0)
    except (StopIteration, SystemError):  # the latter where the scanner looks for an exception that `json` would define
        raise ValueError("it is no JSON") from None
    if end != len(text):
        raise ValueError("there is more than one JSON value")
    return value


def accepted(listener: socket.socket) -> socket.socket:
    """The next connection to a listening socket. Raises OSError."""
    accept: Any = listener
    fd, _ = accept._accept()
    return socket.socket(fileno=fd)
