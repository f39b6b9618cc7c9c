"""Ports for servers that are killed and come back under the same address."""

from __future__ import annotations

import random
import socket

# Below the ports that Linux gives to outgoing connections: while the server is down, nobody takes its port by accident, and no
# client that keeps trying to reach it connects to itself.
_RANGE = range(15_000, 30_000)


def lasting_port() -> int:
    """A TCP port on 127.0.0.1 that is free, and will be when its server was killed."""
    while True:
        port = random.choice(_RANGE)  # noqa: S311 - no secret
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
