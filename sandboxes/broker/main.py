"""Start-up of the broker: `python3 -I -S -c START BUNDLE DESCRIPTOR LABEL` with a listening Unix socket as standard input.

DESCRIPTOR is the number of an open file with the configuration, one JSON object: `limits` (the fields of
`sandboxes.protocol.Limits`), `env` (the whole environment of tools) and `dead_man_seconds`. Optional are `writable` (where
files can be written: `watchdog.Writable`), `system_calls` (the filter program in hexadecimal digits), `pins_cpus` (whether
`cpus` is to be kept by us), `control_group`: the descriptors of its open files `procs` (to write) and `memory_events`, `held`:
descriptors to keep open, and `programs`: commands for `bash` and `python3` where the root has none. It comes by a descriptor
because arguments are visible to every user of the host. LABEL is not used: it marks the process for whoever looks for it.
"""

from __future__ import annotations

import gc
import os

from .lean import from_json, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    from .confine import close_inherited, join_control_group, keep_to_cpus

    with open(int(arguments[0]), "rb") as file:  # noqa: PTH123 - a descriptor
        config = from_json(file.read())
    limits = config["limits"]
    control_group = config.get("control_group", {})
    close_inherited(but=[*control_group.values(), *config.get("held", ())])

    from .loop import Loop
    from .prctl import refuse_system_calls
    from .processes import protect_broker
    from .server import Server
    from .tool import Settings
    from .watchdog import Watchdog, Writable

    if control_group:
        join_control_group(control_group["procs"])
    protect_broker()
    if config.get("pins_cpus"):
        keep_to_cpus(limits["cpus"])
    if config.get("system_calls"):
        refuse_system_calls(bytes.fromhex(config["system_calls"]))
    listener = socket.socket(fileno=os.dup(0))
    home = config["env"].get("HOME", "/")
    os.environ["HOME"] = home  # what ~ means in paths; Apptainer sets another one
    os.chdir(home)
    loop = Loop()
    server = Server(loop, listener, Settings(limits, config["env"], config.get("programs", {})), config["dead_man_seconds"])
    writable = Writable(**config.get("writable", {}))
    Watchdog(loop, list(server.tools.values()), limits, writable, control_group.get("memory_events", -1))
    wall_seconds = limits.get("wall_seconds")
    if wall_seconds is not None:
        loop.call_later(wall_seconds, lambda: server.end("wall_seconds", f"it was ended after {wall_seconds:g} s"))
    gc.enable()  # see the line that starts us
    loop.run()
