"""Unix sockets in directories of any length. No Django."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_NAME = "broker.sock"


def listen(directory: Path, backlog: int = 128) -> socket.socket:
    """A listening socket in `directory`, to be handed to a broker. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(directory) as address:
            listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(directory: Path) -> socket.socket:
    """A non-blocking connection to the broker that listens in `directory`. Raises OSError."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.setblocking(False)
    try:
        with _address(directory) as address:
            peer.connect(address)
    except BaseException:
        peer.close()
        raise
    return peer


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    # A socket's address holds 107 bytes, a state directory can be longer: /proc names the open directory in a few.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_NAME}"
    finally:
        os.close(fd)
