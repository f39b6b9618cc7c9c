"""One call of spython, in a process of its own: `python -m sandboxes.backends.apptainer.spython_child DESCRIPTOR`. No Django.

spython waits without a limit, mixes what programs print with its own messages, and exits the interpreter when something is
wrong. Here it can do all that. The request comes on standard input; the result is written to DESCRIPTOR, both as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from spython.main import Client


def _version() -> str:
    return str(Client.version())


def _inspect(image: str) -> Any:
    """An image's attributes, or what `run_command` returned when it failed."""
    return Client.inspect(image, quiet=True)


def _build(source: str, target: str, options: list[str]) -> None:
    # With `sudo`, the default, it asks for a password; without `stream` it prints nothing before the end.
    _, lines = Client.build(source, target, options=options, sudo=False, stream=True, quiet=True, force=True)
    try:
        for line in lines:
            print(line, end="", flush=True)
    except subprocess.CalledProcessError as error:  # the program has said why
        sys.exit(error.returncode)


def _start(image: str, name: str, options: list[str]) -> None:
    Client.instance(image, name=name, options=options, quiet=True)


def _instances() -> Any:
    return Client.instances(return_json=True, quiet=True)


CALLS: Mapping[str, Callable[..., Any]] = {
    "version": _version,
    "inspect": _inspect,
    "build": _build,
    "start": _start,
    "instances": _instances,
}


def main(descriptor: int) -> None:
    request = json.load(sys.stdin)
    user = request["user"]
    if user is not None:  # only now, since that user may not be able to read the libraries that were imported
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    result = CALLS[request["call"]](**request["arguments"])
    with os.fdopen(descriptor, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(int(sys.argv[1]))
