"""Starting one bubblewrap sandbox, detached from the process that starts it. No Django."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sandboxes import channel
from sandboxes.backends import bwrap_program, host_processes
from sandboxes.backends.bundle import START
from sandboxes.backends.bwrap_arguments import OVERLAY, UPPER, WORK, ImageRoot, file_texts, sandbox_arguments, writable_places
from sandboxes.backends.enforcement import Enforcement
from sandboxes.backends.roots import runtime
from sandboxes.backends.roots.ready import ReadyRoot
from sandboxes.backends.staging import reachable, shared_file
from sandboxes.backends.state import LOG, Place
from sandboxes.errors import SandboxStartFailed
from sandboxes.protocol import HOST, Changes, Root, SandboxSpec

INTERPRETER = "/usr/bin/python3"

_STATUS = "bubblewrap.json"  # written by bubblewrap before it lets process 1 go on
_DISK = "changes"
_ABANDON_TIMEOUT = 1.0  # what is left then, `stop` finds

# Goes before bubblewrap, in a mount namespace of its own, when the root takes changes: bubblewrap's own memory for them would
# have no bound, and the sandboxes' host user cannot go by name to where they are on a disk.
_PREPARE = f"""
umask 022
if [ "$1" ]; then
    mount -n -t tmpfs -o "size=$1,mode=0755" sandbox {OVERLAY} && mkdir {OVERLAY}/{UPPER} {OVERLAY}/{WORK} || exit
else
    mount -n -c --bind . {OVERLAY} || exit
fi
[ -z "$2" ] || export LD_LIBRARY_PATH="$2"
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """What a sandbox is made of on this host; constant for the life of the process."""

    bwrap: str
    version: str
    bundle: bytes
    user: int | None  # host user of the sandboxes, None for our own
    enforcement: Enforcement


@dataclass(frozen=True)
class Base:
    """What a sandbox is started from: an image and the runtime for it, or neither for the host's own system."""

    root: Root = HOST
    ready: ReadyRoot | None = None
    runtime: runtime.Runtime | None = None


@contextlib.contextmanager
def launch(host: Host, place: Place, spec: SandboxSpec, base: Base) -> Iterator[Mapping[str, str]]:
    """Start the sandbox detached, for the caller to wait inside the block until its broker serves; gives how limits are held.

    bubblewrap's own process only waits for process 1. It is ended with the block, so that no worker has to reap it later; if
    the block raises, the sandbox is ended too.
    """
    image = _image(place, spec, base, host.user)
    held = [] if base.ready is None else list(base.ready.descriptors)
    with contextlib.ExitStack() as stack:
        confinement = stack.enter_context(host.enforcement.confinement(place, spec.limits, writable_places(image)))
        program = stack.enter_context(bwrap_program.opened(host.bwrap))
        status = stack.enter_context((place.directory / _STATUS).open("wb")).fileno()
        config = {**broker_configuration(spec, base), "held": held, **confinement.config}
        configuration = memory_file(stack, json.dumps(config))
        files = {path: memory_file(stack, text) for path, text in file_texts(spec, image).items()}
        options = sandbox_arguments(spec, image, files, _mounts(host, spec, base, image), status)
        arguments = memory_file(stack, "\0".join(options) + "\0")
        log = stack.enter_context((place.directory / LOG).open("wb"))
        listener = stack.enter_context(channel.listen(place.directory))
        inherited = [status, configuration, arguments, *files.values(), *program.descriptors, *confinement.descriptors, *held]
        command = [program.name, "--args", str(arguments), "--", *broker_command(base), str(configuration), place.label]
        try:
            launcher = subprocess.Popen(
                bwrap_program.as_user(host.user, [*_preparation(spec, image, program), *command]),
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                pass_fds=inherited,
                start_new_session=True,
                cwd="/" if image is None or image.disk is None else image.disk,
                env={"PATH": os.defpath, **program.env},
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


def _image(place: Place, spec: SandboxSpec, base: Base, user: int | None) -> ImageRoot | None:
    if base.ready is None:
        return None
    disk = None
    if spec.changes is Changes.DISK:
        disk = place.directory / _DISK
        for path, mode in ((disk, 0o700), (disk / UPPER, 0o755), (disk / WORK, 0o700)):
            path.mkdir()
            path.chmod(mode)  # whatever the umask is
            if user is not None:
                os.chown(path, user, user)
    return ImageRoot(base.ready.directory, spec.changes, disk)


def _preparation(spec: SandboxSpec, image: ImageRoot | None, program: bwrap_program.Opened) -> Sequence[str]:
    if image is None or image.changes is Changes.REFUSED:
        return []
    size = f"{spec.limits.disk_mb}m" if image.disk is None else ""
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _PREPARE, "sh", size, program.libraries]


def broker_configuration(spec: SandboxSpec, base: Base) -> dict[str, Any]:
    """Without what holds its limits."""
    always = {name: bwrap_program.BASE_ENV[name] for name in ("HOME", "TMPDIR")}
    return {
        "limits": asdict(spec.limits),
        "env": {**bwrap_program.BASE_ENV, **dict(base.root.env), **always, **spec.env},
        "dead_man_seconds": spec.dead_man_seconds,
        "programs": {} if base.runtime is None else {"bash": base.runtime.shell, "python3": base.runtime.python},
    }


def _mounts(host: Host, spec: SandboxSpec, base: Base, image: ImageRoot | None) -> dict[str, str]:
    mounts = dict(base.runtime.mounts) if base.runtime is not None else {}
    if base.runtime is None:
        mounts[bwrap_program.BUNDLE] = str(shared_file("broker.pyz", host.bundle))
    if image is not None and image.disk is not None:
        mounts[runtime.CHANGES] = f"{OVERLAY}/{UPPER}"
    return mounts | {bind.target: bind.source if host.user is None else reachable(bind.source) for bind in spec.binds}


def broker_command(base: Base) -> list[str]:
    """The command inside; the descriptor with its configuration and the label follow."""
    if base.runtime is None:
        return [INTERPRETER, "-I", "-S", "-c", START, bwrap_program.BUNDLE]
    return [*base.runtime.python, "-I", "-S", "-c", START, runtime.BUNDLE]


def memory_file(stack: contextlib.ExitStack, text: str) -> int:
    fd = os.memfd_create("sandbox")
    stack.callback(os.close, fd)
    os.pwrite(fd, text.encode(errors="surrogateescape"), 0)
    return fd
