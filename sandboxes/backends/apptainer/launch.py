"""Starting one Apptainer sandbox, detached from the process that starts it. No Django."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxes import channel
from sandboxes.backends.apptainer.processes import shell_command
from sandboxes.backends.apptainer.program import Program, process_options
from sandboxes.backends.bwrap_program import as_user
from sandboxes.backends.enforcement import Enforcement, Writable
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


@dataclass(frozen=True)
class Entry:
    """How the container is entered: `command` and the broker's; `work` and `config` are for `process_options`."""

    command: Sequence[str]
    work: Path
    config: Path | None = None


@contextlib.contextmanager
def launch(
    host: Host, place: Place, spec: SandboxSpec, base: Base, entry: Entry, writable: Writable
) -> Iterator[Mapping[str, str]]:
    """Start the broker, for the caller to wait inside the block until it serves; gives how limits are held.

    What was started is left to the caller also when the block raises.
    """
    held = [] if base.ready is None else list(base.ready.descriptors)
    with contextlib.ExitStack() as stack:
        confinement = stack.enter_context(host.enforcement.confinement(place, spec.limits, writable))
        settings = {**broker_configuration(spec, base), "held": held, **confinement.config}
        configuration = memory_file(stack, json.dumps(settings))
        broker = [*broker_command(base), str(configuration), place.label]
        log = stack.enter_context((place.directory / LOG).open("wb"))
        listener = stack.enter_context(channel.listen(place.directory))
        try:
            shell = subprocess.Popen(
                as_user(host.user, shell_command(place.label, [*entry.command, *broker])),
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                pass_fds=[configuration, *confinement.descriptors, *held],
                start_new_session=True,
                **process_options(None, entry.work, entry.config),
            )
        except OSError as error:
            raise SandboxStartFailed(f"{place.name}: {error}") from error
        listener.close()  # so that a connection fails at once when the launcher ends early
        try:
            yield {**confinement.enforced, **host.program.enforced()}
        finally:
            shell.kill()  # not what it started: no worker has to wait for that later
            shell.wait()
