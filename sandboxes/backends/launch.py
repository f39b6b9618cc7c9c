"""Starting one bubblewrap sandbox, detached from the process that starts it. No Django."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from sandboxes import channel
from sandboxes.backends import bwrap_program, host_processes
from sandboxes.backends.enforcement import Enforcement
from sandboxes.backends.staging import reachable
from sandboxes.backends.state import LOG, Place
from sandboxes.errors import SandboxStartFailed
from sandboxes.protocol import SandboxSpec

INTERPRETER = "/usr/bin/python3"

_STATUS = "bubblewrap.json"  # written by bubblewrap before it lets process 1 go on
_ABANDON_TIMEOUT = 1.0  # what is left then, `stop` finds


@dataclass(frozen=True)
class Host:
    """What a sandbox is made of on this host; constant for the life of the process."""

    bwrap: str
    version: str
    bundle: bytes
    user: int | None  # host user of the sandboxes, None for our own
    enforcement: Enforcement


@contextlib.contextmanager
def launch(host: Host, place: Place, spec: SandboxSpec) -> Iterator[Mapping[str, str]]:
    """Start the sandbox detached, for the caller to wait inside the block until its broker serves; gives how limits are held.

    bubblewrap's own process only waits for process 1. It is ended with the block, so that no worker has to reap it later; if
    the block raises, the sandbox is ended too.
    """
    with contextlib.ExitStack() as stack:
        writable = bwrap_program.WRITABLE
        confinement = stack.enter_context(host.enforcement.confinement(place, spec.limits, writable))
        config = {
            "limits": asdict(spec.limits),
            "env": {**bwrap_program.BASE_ENV, **spec.env},
            "dead_man_seconds": spec.dead_man_seconds,
            **confinement.config,
        }
        status = stack.enter_context((place.directory / _STATUS).open("wb")).fileno()
        configuration = _memory_file(stack, json.dumps(config).encode())
        files = {path: _memory_file(stack, text.encode()) for path, text in bwrap_program.etc_files(spec.network).items()}
        files[bwrap_program.BUNDLE] = _memory_file(stack, host.bundle)
        binds = {bind.target: bind.source if host.user is None else reachable(bind.source) for bind in spec.binds}
        options = bwrap_program.sandbox_arguments(spec, files, binds, status)
        arguments = _memory_file(stack, "\0".join(options).encode() + b"\0")
        broker = [INTERPRETER, "-I", "-S", bwrap_program.BUNDLE, str(configuration), place.label]
        log = stack.enter_context((place.directory / LOG).open("wb"))
        listener = stack.enter_context(channel.listen(place.directory))
        inherited = [status, configuration, arguments, *files.values(), *confinement.descriptors]
        try:
            launcher = subprocess.Popen(
                [host.bwrap, "--args", str(arguments), "--", *broker],
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                pass_fds=inherited,
                start_new_session=True,
                **bwrap_program.process_options(host.bwrap, host.user),
            )
        except OSError as error:
            raise SandboxStartFailed(f"{place.name}: {error}") from error
        listener.close()  # so that a connection fails at once when the launcher ends early
        try:
            yield confinement.enforced
        except BaseException:
            launcher.kill()
            launcher.wait()
            host_processes.end_marked(read_mark(place), _ABANDON_TIMEOUT)
            raise
        finally:
            launcher.kill()
            launcher.wait()


def read_mark(place: Place) -> host_processes.Mark:
    """How to recognise the processes of a sandbox.

    bubblewrap writes its line in pieces, and may be ended between two of them. Until the line is whole, process 1 waits for
    bubblewrap and still carries the label in its arguments.
    """
    try:
        line, whole, _ = (place.directory / _STATUS).read_text().partition("\n")
    except FileNotFoundError:
        return host_processes.Mark(place.label, None, None)
    if not whole:
        return host_processes.Mark(place.label, None, None)
    status = json.loads(line)
    return host_processes.Mark(place.label, int(status["child-pid"]), int(status["pid-namespace"]))


def _memory_file(stack: contextlib.ExitStack, data: bytes) -> int:
    fd = os.memfd_create("sandbox")
    stack.callback(os.close, fd)
    os.pwrite(fd, data, 0)
    return fd
