"""What makes a bubblewrap process a sandbox: its namespaces, its root, and what is shown there. No Django."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from sandboxes.backends.bwrap_program import BASE_ENV, HOME, SANDBOX_ID, etc_files
from sandboxes.backends.enforcement import Writable
from sandboxes.backends.kernel_files import kernel_files
from sandboxes.backends.roots.identity import identity_files
from sandboxes.backends.roots.inside import resolved
from sandboxes.backends.roots.runtime import CHANGES, PLACE
from sandboxes.protocol import Changes, NetworkMode, SandboxSpec

# Over what nobody needs in the launcher's own mount namespace; with the directories of an overlay in it.
OVERLAY = "/sys"
UPPER, WORK = "upper", "work"

_TOP_LEVEL = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SHARED_ETC = ("alternatives", "ld.so.cache", "localtime", "ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")
_MEMORY = (("/tmp", "1777"), (HOME, "0755"))  # noqa: S108 - inside
_SHM_MIB = 64
_MIB = 1024 * 1024
# In a root that the agent may change, these are what lets it install packages; none of them reaches out of its namespaces.
_ROOT_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETGID", "CAP_SETUID")
_KERNEL_DIRECTORIES = ("acpi", "scsi")


@dataclass(frozen=True)
class ImageRoot:
    """The directory of an image on this host, and what the sandbox makes of it."""

    directory: Path
    changes: Changes
    disk: Path | None  # with UPPER and WORK, when changes go to a disk


def writable_places(image: ImageRoot | None) -> Writable:
    """Where files can be written, for the limits on them."""
    memory, bounded = ("/tmp", HOME, "/dev/shm"), ("/tmp", HOME)  # noqa: S108 - inside
    if image is None or image.changes is Changes.REFUSED:
        return Writable(memory=memory, bounded=bounded)
    if image.changes is Changes.DISK:
        return Writable(memory=memory, bounded=bounded, disk=(CHANGES,))
    return Writable(memory=(*memory, "/"), bounded=(*bounded, "/"))


def file_texts(spec: SandboxSpec, image: ImageRoot | None) -> dict[str, str]:
    """The files that the sandbox has of its own, by path inside. Raises SandboxStartFailed."""
    files = etc_files(spec.network)
    if image is not None:
        del files["/etc/nsswitch.conf"]
    return {**files, **identity_files(None if image is None else image.directory, sandbox_id(spec), HOME)}


def sandbox_id(spec: SandboxSpec) -> int:
    """The agent's number inside, as user and as group."""
    return 0 if spec.fakeroot else SANDBOX_ID


def sandbox_arguments(
    spec: SandboxSpec, image: ImageRoot | None, files: dict[str, int], mounts: dict[str, str], status: int
) -> list[str]:
    """bubblewrap's options for `spec`, in the host's own root when there is no image.

    `files` maps paths inside to open descriptors with their contents, `mounts` to the host paths shown there, read-only;
    `status` is where bubblewrap reports the host pid. Raises SandboxStartFailed for an image that has something else there.
    """
    places = _Places(image)
    proc, dev = places.find("/proc"), places.find("/dev")
    arguments = [*_namespaces(spec), *(_host_root() if image is None else _image_root(image))]
    for target, fd in files.items():
        arguments += ["--perms", "0444" if image is None else "0644", "--file", str(fd), places.find(target)]
    arguments += ["--proc", proc, "--dev", dev]
    for target, mode in _MEMORY:
        arguments += ["--perms", mode, "--size", str(spec.limits.disk_mb * _MIB), "--tmpfs", places.find(target)]
    arguments += ["--perms", "1777", "--size", str(_SHM_MIB * _MIB), "--tmpfs", f"{dev}/shm"]
    arguments += _hidden_kernel(proc)
    for target, source in mounts.items():
        arguments += ["--ro-bind", source, places.find(target)]
    # /dev is memory without a size limit, as the root is that has no overlay: nothing may be written there.
    arguments += ["--remount-ro", dev]
    if image is None or image.changes is Changes.REFUSED:
        arguments += ["--remount-ro", "/"]
    return [*arguments, "--chdir", places.find(HOME), "--json-status-fd", str(status)]


def _namespaces(spec: SandboxSpec) -> list[str]:
    number = str(sandbox_id(spec))
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", number, "--gid", number]
    if spec.network.mode is NetworkMode.FULL:
        arguments += ["--share-net"]
    # As process 1 the broker cannot be signalled from inside, adopts orphans, and takes everything with it when it ends.
    arguments += ["--as-pid-1", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    if spec.fakeroot:
        arguments += [part for capability in _ROOT_CAPABILITIES for part in ("--cap-add", capability)]
    return [*arguments, *(part for name, value in BASE_ENV.items() for part in ("--setenv", name, value))]


@functools.cache
def _hidden_kernel(proc: str) -> list[str]:
    arguments = []
    for path in kernel_files():
        arguments += ["--ro-bind", "/dev/null", path.replace("/proc", proc, 1)]
    for name in filter(lambda name: Path("/proc", name).exists(), _KERNEL_DIRECTORIES):
        arguments += ["--perms", "0555", "--size", "4096", "--tmpfs", f"{proc}/{name}", "--remount-ro", f"{proc}/{name}"]
    return arguments


@functools.cache
def _host_root() -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr", "--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]  # noqa: S108
    for path in map(Path, _TOP_LEVEL):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for name in ("etc", "etc/ssl", "etc/pki", "etc/pki/tls", "etc/pki/ca-trust"):
        arguments += ["--dir", f"/{name}"]  # readable, which directories are not that bubblewrap makes on the way
    for name in _SHARED_ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return arguments


def _image_root(image: ImageRoot) -> list[str]:
    lower = ["--overlay-src", str(image.directory)]
    if image.changes is Changes.REFUSED:
        return [*lower, "--tmp-overlay", "/"]  # in which mount points are made, before it becomes read-only
    return [*lower, "--overlay", f"{OVERLAY}/{UPPER}", f"{OVERLAY}/{WORK}", "/"]


class _Places:
    """Where paths inside really are, as an image may have symbolic links on the way."""

    def __init__(self, image: ImageRoot | None) -> None:
        self._root = None if image is None else image.directory
        self._mounted: tuple[str, ...] = ()
        self._mounted = tuple(self.find(path) for path in ("/proc", "/dev", PLACE, *(path for path, _ in _MEMORY)))

    def find(self, path: str) -> str:
        return path if self._root is None else resolved(self._root, path, self._mounted)
