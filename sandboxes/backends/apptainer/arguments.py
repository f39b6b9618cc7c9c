"""What Apptainer is told, for its container to be a sandbox. No Django."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxes.backends.apptainer.layers import host_root, image_layer
from sandboxes.backends.apptainer.preparation import MEMORY, ROOT, preparation, upper
from sandboxes.backends.apptainer.program import Program
from sandboxes.backends.bwrap_program import BUNDLE, HOME, etc_files
from sandboxes.backends.enforcement import Writable
from sandboxes.backends.kernel_files import kernel_files
from sandboxes.backends.launch import Base
from sandboxes.backends.roots.identity import identity_files
from sandboxes.backends.roots.inside import resolved
from sandboxes.backends.roots.runtime import CHANGES, PLACE
from sandboxes.backends.staging import reachable, shared_file
from sandboxes.protocol import Changes, NetworkMode, SandboxSpec

# Not even where the installation's configuration has them.
_NEVER_MOUNTED = "home,cwd,sys,hostfs,bind-paths"
_MOUNT_POINTS = ("/dev", "/proc", "/sys", "/tmp", "/var/tmp", HOME, PLACE)  # noqa: S108 - inside
# In a root that the agent may change, these are what lets it install packages; none of them reaches out of its namespaces.
_ROOT_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETGID", "CAP_SETUID")
_HOSTNAME = "sandbox"
# What an instance begins with. It stays when that has ended.
_START = {"/.singularity.d/actions/start": "#!/bin/sh\n"}


@dataclass(frozen=True)
class Image:
    """`directory` is the host's; `layer` is to be laid over it, `binds` are host paths by where they are shown, read-only."""

    directory: Path
    layer: Path | None
    binds: Mapping[str, str]


def prepared_image(spec: SandboxSpec, base: Base, bundle: bytes, user: int | None) -> Image:
    """For sandboxes of the host user `user` (None: us). Raises SandboxStartFailed."""
    texts, uid = etc_files(spec.network), _uid(spec, user)
    binds = {bind.target: bind.source if user is None else reachable(bind.source) for bind in spec.binds}
    if base.ready is None or base.runtime is None:
        root, bound = host_root({**texts, **identity_files(None, uid, HOME), BUNDLE: "", **_START})
        return Image(root, None, {**{path: path for path in bound}, BUNDLE: str(shared_file("broker.pyz", bundle)), **binds})
    directory = base.ready.directory
    del texts["/etc/nsswitch.conf"]
    texts |= {**identity_files(directory, uid, HOME), "/etc/hostname": f"{_HOSTNAME}\n", **_START}
    # A root that can be changed gets no mount points from Apptainer.
    texts |= {target: "" for target, source in binds.items() if not Path(source).is_dir()}
    points = [*_MOUNT_POINTS, *(target for target, source in binds.items() if Path(source).is_dir())]
    files = {resolved(directory, path): text for path, text in texts.items()}
    layer = image_layer(files, [resolved(directory, path) for path in points], user)
    return Image(directory, layer, {**base.runtime.mounts, **binds})


@dataclass(frozen=True)
class Container:
    """The parts of a command: PROGRAM exec --pwd HOME OPTIONS IMAGE ... or PROGRAM instance start OPTIONS IMAGE NAME."""

    program: list[str]
    options: list[str]
    image: str


def container_of(program: Program, spec: SandboxSpec, image: Image, work: Path) -> Container:
    """What makes a container a sandbox; `work` is the folder of this sandbox's launcher."""
    command, options = program.with_configuration(spec.limits.disk_mb), _isolation(program, spec)
    mounts = {**dict.fromkeys(kernel_files(), "/dev/null"), **image.binds}
    if image.layer is not None or spec.fakeroot:
        layers = None if image.layer is None else (image.directory, image.layer)
        command = [*preparation(work, spec.limits.disk_mb, spec.changes, layers), *command]
        options += ["--workdir", str(work / MEMORY)]
    if image.layer is not None and spec.changes is not Changes.REFUSED:
        options += ["--writable"]
        if spec.changes is Changes.DISK:
            mounts[CHANGES] = str(upper(work, spec.changes))
    for target, source in mounts.items():
        options += ["--mount", ",".join(["type=bind", _field("source", source), _field("destination", target), "ro"])]
    return Container(command, options, str(image.directory if image.layer is None else work / ROOT))


def writable_places(spec: SandboxSpec, image: Image) -> Writable:
    """Where files can be written, for the limits on them."""
    sized = ["/tmp"] if spec.fakeroot else ["/tmp", "/dev"]  # noqa: S108 - inside; both in one tmpfs, or each in its own
    disk = [CHANGES] if image.layer is not None and spec.changes is Changes.DISK else []
    return Writable(memory=["/tmp", "/dev"], bounded=sized, disk=disk)  # noqa: S108 - inside


def _isolation(program: Program, spec: SandboxSpec) -> list[str]:
    # --containall: own processes, IPC, /dev and /tmp, nothing of the environment, no privileges.
    options = ["--userns", "--containall", "--cleanenv", "--no-home", "--no-mount", _NEVER_MOUNTED, "--hostname", _HOSTNAME]
    # Without the shim the broker is process 1: it cannot be signalled from inside and takes everything with it when it ends.
    options += ["--no-init", "--scratch", HOME, "--scratch", "/dev/shm"]  # noqa: S108 - inside
    if spec.network.mode is not NetworkMode.FULL:
        options += ["--net", "--network", "none"]
    if spec.fakeroot:
        options += ["--fakeroot", "--add-caps", ",".join(_ROOT_CAPABILITIES)]
        if program.product == "apptainer":
            # One id inside is one id outside: files and processes of subordinate ids could not be removed by us.
            options += ["--ignore-subuid", "--ignore-fakeroot-command"]
    return options


def _uid(spec: SandboxSpec, user: int | None) -> int:
    """The agent's number inside, which cannot be chosen."""
    return 0 if spec.fakeroot else os.geteuid() if user is None else user


def _field(key: str, value: str) -> str:
    """One field of a line of comma-separated values."""
    field = f"{key}={value}"
    return '"' + field.replace('"', '""') + '"' if any(character in field for character in ',"\n') else field
