"""Which Apptainer this host has, and what it lets us configure. No Django."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.backends.staging import shared_file
from sandboxes.errors import BackendUnavailable

TRIAL_PREFIX = "/opt/prorl-apptainer"  # where deploy/apptainer/install.sh puts one

_MINIMUM_VERSIONS = {"apptainer": (1, 3), "singularity-ce": (4, 0)}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TIMEOUT = 20.0
_SESSION_SIZE = "sessiondir max size"
# Set whatever the installation's configuration says, where it may be replaced.
_OURS = {
    "config passwd": "no",
    "config group": "no",
    "config resolv_conf": "no",
    "mount home": "no",
    "mount sys": "no",
    "mount hostfs": "no",
    "always use nv": "no",
    "always use rocm": "no",
    "root default capabilities": "no",
}


@dataclass(frozen=True)
class Program:
    """An Apptainer, or a SingularityCE, which differs in little more than the names of variables."""

    path: str
    product: str  # "apptainer" or "singularity-ce"
    version: str
    configuration: str  # the installation's own, its text
    configurable: bool  # whether sandboxes may have another one; not where a part of it runs with setuid

    def enforced(self) -> dict[str, str]:
        """Limits that the installation's configuration holds instead of us."""
        if self.configurable:
            return {}
        match = re.search(rf"^\s*{_SESSION_SIZE}\s*=\s*(\d+)", self.configuration, re.MULTILINE)
        return {"disk_mb": f"tmpfs size, {match[1] if match else 64} MiB by {self.product}.conf"}

    def with_configuration(self, session_mb: int) -> list[str]:
        """The command's beginning, so that what is written to memory is at most `session_mb` MiB where we may decide that."""
        if not self.configurable:
            return [self.path]
        file = shared_file("apptainer.conf", _configured(self.configuration, session_mb).encode())
        return [self.path, "--config", str(file)]


def find_program(chosen: str, user: int | None) -> Program:
    """The program named `chosen`, else the first of apptainer and singularity on PATH, else the one installed for trials.

    `user` is the host user it will run as, None for the current one. Raises BackendUnavailable, with each candidate's problem.
    """
    problems = []
    for path in [chosen] if chosen else _candidates():
        try:
            return _examined(path, user)
        except BackendUnavailable as error:
            problems.append(str(error))
    hint = "set PRORL_APPTAINER, or install Apptainer >= 1.3 (to try it out on Debian: deploy/apptainer/install.sh)"
    raise BackendUnavailable("; ".join(["no usable Apptainer", *problems, hint]))


def process_options(user: int | None, work: Path, config: Path | None = None) -> dict[str, Any]:
    """How the program is started whatever it is to do: as `user`, with nothing of our environment, its files below `work`."""
    return {
        "cwd": "/",
        "env": environment(work, config),
        "user": user,
        "group": user,
        "extra_groups": None if user is None else [],
    }


def environment(work: Path, config: Path | None = None) -> dict[str, str]:
    """The whole environment of the program, whichever of the two it is; instances are listed below `config`."""
    folders = {"TMPDIR": work / "tmp", "CACHEDIR": work / "cache", "CONFIGDIR": config or work / "config"}
    variables = {"PATH": _PATH, "HOME": str(work), "LANG": "C.UTF-8"}
    for name, folder in folders.items():
        variables[f"APPTAINER_{name}"] = variables[f"SINGULARITY_{name}"] = str(folder)
    return variables


def _candidates() -> Iterable[str]:
    for name in ("apptainer", "singularity"):
        found = shutil.which(name, path=None) or shutil.which(name, path=_PATH)
        if found is not None:
            yield found
    if Path(TRIAL_PREFIX, "bin/apptainer").exists():
        yield f"{TRIAL_PREFIX}/bin/apptainer"


def _examined(path: str, user: int | None) -> Program:
    product, version = parse_version(path, _output(path, user, "--version"))
    if tuple(int(part) for part in version.split(".")[:2]) < _MINIMUM_VERSIONS[product]:
        raise BackendUnavailable(f"{path} is {product} {version}, which is too old")
    facts = dict(line.partition("=")[::2] for line in _output(path, user, "buildcfg").splitlines())
    family = "APPTAINER" if product == "apptainer" else "SINGULARITY"
    file = facts.get(f"{family}_CONF_FILE", "")
    try:
        configuration = Path(file).read_text()
    except OSError as error:
        raise BackendUnavailable(f"{path}: its configuration {file!r} cannot be read: {error.strerror}") from None
    program = Program(path, product, version, configuration, configurable=True)
    try:
        _output(path, user, *program.with_configuration(64)[1:], "buildcfg")
    except BackendUnavailable:
        return Program(path, product, version, configuration, configurable=False)
    return program


def parse_version(path: str, text: str) -> tuple[str, str]:
    """(product, version) from what `--version` prints. Raises BackendUnavailable for anything else."""
    match = re.match(r"(apptainer|singularity-ce) version (\d+\.\d+[^-+\s]*)", text)
    if match is None:
        raise BackendUnavailable(f"{path} is neither Apptainer nor SingularityCE: {text.strip()[:200]!r}")
    return match[1], match[2]


def _output(path: str, user: int | None, *arguments: str) -> str:
    options = process_options(user, Path("/nonexistent"))
    try:
        run = subprocess.run([path, *arguments], capture_output=True, text=True, check=True, timeout=_TIMEOUT, **options)
    except subprocess.CalledProcessError as error:
        raise BackendUnavailable(f"{path} {arguments[-1]} fails: {error.stderr.strip()[-300:]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        who = "" if user is None else f" as user {user}"
        raise BackendUnavailable(f"{path} does not run{who}: {error}") from None
    return str(run.stdout)


def _configured(installed: str, session_mb: int) -> str:
    ours: Mapping[str, str] = {**_OURS, _SESSION_SIZE: str(session_mb)}
    kept = []
    for line in installed.splitlines():
        key = line.partition("=")[0].strip()
        if not line.lstrip().startswith("#") and key not in ours and key != "bind path":
            kept.append(line)
    return "\n".join([*filter(str.strip, kept), *(f"{key} = {value}" for key, value in ours.items())]) + "\n"
