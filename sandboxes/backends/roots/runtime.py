"""An interpreter and a shell of the host's that run inside any image, whatever C library that has, or none. No Django.

The broker runs on them: an image may lack Python, have an old one, or let the agent change it. They are shown at one place,
each started through the host's own dynamic loader with the libraries that it needs. The place is a mount point in the root,
because an agent who may change the image could rename any directory above one that is deeper.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sandboxes.backends.staging import make_once
from sandboxes.errors import BackendUnavailable

PLACE = "/.prorl"  # inside
BUNDLE = f"{PLACE}/broker.pyz"
CHANGES = f"{PLACE}/changes"  # an empty directory, to mount on

_SHELL = "/bin/bash"
_LIBRARY = re.compile(r"^\s*(?:(\S+) => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_ASK = "import json, os, sys; print(json.dumps([os.path.realpath(sys.executable), os.path.dirname(os.__file__)]))"


@dataclass(frozen=True)
class Runtime:
    """`mounts` are directories of the host by where they are shown, read-only; `python` and `shell` the commands inside."""

    mounts: dict[str, str]
    python: list[str]
    shell: list[str]

    def is_there(self) -> bool:
        """Whether nobody has cleaned it away."""
        return all(Path(directory).exists() for directory in self.mounts.values())


def build_runtime(interpreter: str, bundle: bytes, folder: Path) -> Runtime:
    """Collects the files and the broker, once for each state of them, in a directory below `folder`, which any user can enter.

    Blocks, for about half a second. Raises BackendUnavailable.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise BackendUnavailable(f"images need programs of the host in {folder}, which is mounted noexec: mount it with exec")
    try:
        asked = subprocess.run([interpreter, "-I", "-S", "-c", _ASK], capture_output=True, text=True, check=True)
        program, library = map(Path, json.loads(asked.stdout))
        extensions = sorted((library / "lib-dynload").glob("*.so"))
        libraries = libraries_of([program, Path(_SHELL), *extensions])
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise BackendUnavailable(f"{interpreter} and {_SHELL} cannot be shown inside images: {error}") from error
    loader = next((name for name in libraries if name.startswith("ld-")), None)
    if loader is None:
        raise BackendUnavailable(f"{interpreter} has no dynamic loader: images need one that is dynamically linked")
    files = {f"lib/{name}": path for name, path in libraries.items()}
    files |= {"bin/python3": program, "bin/bash": Path(_SHELL).resolve()}
    directory = folder / f"runtime-{_key(files, bundle)}"
    make_once(directory, lambda partial: _collect(files, bundle, partial, library.name))
    start = [f"{PLACE}/lib/{loader}", "--library-path", f"{PLACE}/lib"]
    return Runtime(
        {PLACE: str(directory), f"{PLACE}/lib/{library.name}": str(library)},
        [*start, f"{PLACE}/bin/python3"],
        [*start, f"{PLACE}/bin/bash"],
    )


def libraries_of(programs: list[Path]) -> dict[str, Path]:
    """The shared libraries that programs need, by the names that they ask for; as paths that may be links.

    Raises OSError, subprocess.CalledProcessError.
    """
    listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=True)
    return {name or Path(path).name: Path(path) for name, path in _LIBRARY.findall(listed.stdout)}


def _key(files: dict[str, Path], bundle: bytes) -> str:
    states = [(name, str(path), path.stat().st_mtime_ns, path.stat().st_size) for name, path in sorted(files.items())]
    return hashlib.sha256(repr(states).encode() + bundle).hexdigest()[:24]


def _collect(files: dict[str, Path], bundle: bytes, partial: Path, library: str) -> None:
    for name in ("bin", "lib", f"lib/{library}", Path(CHANGES).name):
        (partial / name).mkdir()
    for name, path in files.items():
        shutil.copyfile(path, partial / name)
    (partial / Path(BUNDLE).name).write_bytes(bundle)
    for path in (partial, *partial.rglob("*")):
        path.chmod(0o755)
