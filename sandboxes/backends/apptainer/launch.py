"""Starting one Apptainer sandbox, detached from the process that starts it. No Django."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxes import channel
from sandboxes.backends.apptainer.arguments import command_of, prepared_image, writable_places
from sandboxes.backends.apptainer.processes import shell_command
from sandboxes.backends.apptainer.program import Program, process_options
from sandboxes.backends.enforcement import Enforcement
from sandboxes.backends.launch import Base, broker_command, broker_configuration, memory_file
from sandboxes.backends.state import LOG, Place
from sandboxes.errors import SandboxStartFailed
from sandboxes.protocol import SandboxSpec


@dataclass(frozen=True)
class Host:
    """What a sandbox is made with on this host; constant for the life of the process."""

    program: Program
    bundle: bytes
    user: int | None  # host user of the sandboxes, None for our own
    enforcement: Enforcement


@contextlib.contextmanager
def launch(host: Host, place: Place, spec: SandboxSpec, base: Base, work: Path) -> Iterator[Mapping[str, str]]:
    """Start the broker in a container, for the caller to wait inside the block until it serves; gives how limits are held.

    What was started is left to the caller also when the block raises.
    """
    image = prepared_image(spec, base, host.bundle, host.user)
    held = [] if base.ready is None else list(base.ready.descriptors)
    with contextlib.ExitStack() as stack:
        confinement = stack.enter_context(host.enforcement.confinement(place, spec.limits, writable_places(spec, image)))
        config = {**broker_configuration(spec, base), "held": held, **confinement.config}
        configuration = memory_file(stack, json.dumps(config))
        broker = [*broker_command(base), str(configuration), place.label]
        log = stack.enter_context((place.directory / LOG).open("wb"))
        listener = stack.enter_context(channel.listen(place.directory))
        try:
            shell = subprocess.Popen(
                shell_command(place.label, [*command_of(host.program, spec, image, work), *broker]),
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                pass_fds=[configuration, *confinement.descriptors, *held],
                start_new_session=True,
                **process_options(host.user, work),
            )
        except OSError as error:
            raise SandboxStartFailed(f"{place.name}: {error}") from error
        listener.close()  # so that a connection fails at once when the launcher ends early
        try:
            yield {**confinement.enforced, **host.program.enforced()}
        finally:
            shell.kill()  # not what it started: no worker has to wait for that later
            shell.wait()
