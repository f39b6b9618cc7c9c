"""Start-up of the broker: `python3 -I -S BUNDLE DESCRIPTOR LABEL` with a listening Unix socket as standard input.

DESCRIPTOR is the number of an open file with the configuration, one JSON object: `limits` (the fields of
`sandboxes.protocol.Limits`), `env` (the whole environment of tools) and `dead_man_seconds`. It comes through a descriptor
because arguments are visible to every user of the host. LABEL is not used: it marks the process for whoever looks for it.
"""

from __future__ import annotations

import json
import os
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "worker":
        from .worker import main as serve_cells

        serve_cells(int(arguments[1]))
        return
    # Not needed by the worker, whose start-up they would slow down.
    from .loop import Loop
    from .processes import protect_broker
    from .server import Server
    from .tool import Settings

    protect_broker()
    with open(int(arguments[0]), "rb") as file:  # noqa: PTH123 - a descriptor
        config = json.load(file)
    listener = socket.socket(fileno=os.dup(0))
    os.chdir(config["env"].get("HOME", "/"))
    loop = Loop()
    Server(loop, listener, Settings(config["limits"], config["env"]), config["dead_man_seconds"])
    loop.run()
