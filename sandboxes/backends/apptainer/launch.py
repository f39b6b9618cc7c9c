"""Starting one Apptainer sandbox, detached from the process that starts it. No Django."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sandboxes import channel
from sandboxes.backends.apptainer.arguments import CHANGES
from sandboxes.backends.apptainer.processes import shell_command
from sandboxes.backends.apptainer.program import process_options
from sandboxes.backends.bwrap_program import BASE_ENV, BUNDLE
from sandboxes.backends.enforcement import Enforcement, Writable
from sandboxes.backends.launch import INTERPRETER
from sandboxes.backends.state import LOG, Place
from sandboxes.errors import SandboxStartFailed
from sandboxes.protocol import Changes, SandboxSpec

# All that is written to memory is in one tmpfs, whatever its name inside.
_MEMORY = ("/tmp",)  # noqa: S108 - inside


@contextlib.contextmanager
def launch(
    place: Place, spec: SandboxSpec, container: Sequence[str], enforcement: Enforcement, user: int | None, work: Path
) -> Iterator[Mapping[str, str]]:
    """Run the broker in `container` (a command), for the caller to wait inside the block until it serves.

    Gives how limits are held. What was started is left to the caller also when the block raises.
    """
    writable = Writable(memory=_MEMORY, bounded=_MEMORY, disk=(CHANGES,) if spec.changes is Changes.DISK else ())
    with contextlib.ExitStack() as stack:
        confinement = stack.enter_context(enforcement.confinement(place, spec.limits, writable))
        config = {
            "limits": asdict(spec.limits),
            "env": {**BASE_ENV, **spec.env},
            "dead_man_seconds": spec.dead_man_seconds,
            **confinement.config,
        }
        configuration = os.memfd_create("sandbox")
        stack.callback(os.close, configuration)
        os.pwrite(configuration, json.dumps(config).encode(), 0)
        broker = [INTERPRETER, "-I", "-S", BUNDLE, str(configuration), place.label]
        log = stack.enter_context((place.directory / LOG).open("wb"))
        listener = stack.enter_context(channel.listen(place.directory))
        try:
            shell = subprocess.Popen(
                shell_command(place.label, [*container, *broker]),
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                pass_fds=[configuration, *confinement.descriptors],
                start_new_session=True,
                **process_options(user, work),
            )
        except OSError as error:
            raise SandboxStartFailed(f"{place.name}: {error}") from error
        listener.close()  # so that a connection fails at once when the launcher ends early
        try:
            yield confinement.enforced
        finally:
            shell.kill()  # not what it started: no worker has to wait for that later
            shell.wait()
