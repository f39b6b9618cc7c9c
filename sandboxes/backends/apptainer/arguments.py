"""Composing the arguments of `apptainer exec` and `apptainer instance start`. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sandboxes.backends.apptainer.files import OVERLAY, UPPER
from sandboxes.backends.apptainer.program import Program
from sandboxes.backends.bwrap_program import HOME
from sandboxes.backends.kernel_files import kernel_files
from sandboxes.protocol import Changes, NetworkMode, RootKind, SandboxSpec

CHANGES = "/run/changes"  # where the broker sees what was changed of an image, when that is on disk

# Not even where the installation's configuration has them; a file shown over /etc/hosts would be another one's.
_NEVER_MOUNTED = "home,cwd,sys,hostfs,bind-paths"
_RESOLVING = ("/etc/resolv.conf", "/etc/hosts")


def container_options(program: Program, spec: SandboxSpec, kind: RootKind, binds: Mapping[str, str], work: Path) -> list[str]:
    """What makes a container a sandbox; the image's path comes after it.

    `binds` maps paths inside to host paths that are shown there, read-only; `work` is the folder of this sandbox's launcher.
    """
    # --containall: own processes, IPC, /dev and /tmp, nothing of the environment, no privileges.
    options = ["--containall", "--cleanenv", "--no-home", "--no-mount", _NEVER_MOUNTED]
    # Without the shim the broker is process 1: it cannot be signalled from inside and takes everything with it when it ends.
    options += ["--no-init", "--hostname", "sandbox", "--pwd", HOME, "--scratch", HOME, "--scratch", "/dev/shm"]  # noqa: S108 - inside
    if spec.network.mode is NetworkMode.FULL:
        binds = {**{path: path for path in _RESOLVING if Path(path).exists()}, **binds}
    else:
        options += ["--net", "--network", "none"]
    if spec.fakeroot:
        options += ["--fakeroot"]
        if program.product == "apptainer":
            # One id inside is one id outside: files and processes of subordinate ids could not be removed by us.
            options += ["--ignore-subuid", "--ignore-fakeroot-command"]
    if kind is not RootKind.HOST and spec.changes is Changes.MEMORY:
        options += ["--writable-tmpfs"]
    elif kind is not RootKind.HOST and spec.changes is Changes.DISK:
        options += ["--overlay", str(work / OVERLAY)]
        binds = {**binds, CHANGES: str(work / UPPER)}
    hidden = dict.fromkeys(kernel_files(), "/dev/null")
    for target, source in {**hidden, **binds}.items():
        options += ["--mount", ",".join(["type=bind", _field("source", source), _field("destination", target), "ro"])]
    return options


def _field(key: str, value: str) -> str:
    """One field of a line of comma-separated values."""
    field = f"{key}={value}"
    return '"' + field.replace('"', '""') + '"' if any(character in field for character in ',"\n') else field
