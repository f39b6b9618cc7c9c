"""Root file systems for the checks, made of a few programs of this host: as a directory and as a SIF file."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.roots.runtime import libraries_of
from sandboxes.backends.roots.sif import write_sif
from sandboxes.protocol import Root, RootKind
from sandboxes.selfcheck.framework import CheckSkipped

FACT = "/srv/fact"  # a file of the images, with this text
TEXT = "of the image\n"
USER = "sample"  # one of the images' users

_PROGRAMS = (
    "cat",
    "chmod",
    "chown",
    "cp",
    "dd",
    "env",
    "grep",
    "head",
    "id",
    "ln",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sh",
    "sleep",
    "stat",
)
_DIRECTORIES = ("bin", "etc", "proc", "dev", "srv/closed", "tmp", "var")  # no home: sandboxes bring their own
_FILES = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\n{USER}:x:77:77::/:/bin/sh\n",
    "etc/group": f"root:x:0:\n{USER}:x:77:\n",
}


def directory_root() -> Root:
    """A root without bash, Python and a home; the same at each call."""
    path = _folder() / "root"
    if not path.exists():
        _make(path)
    return Root(RootKind.DIRECTORY, str(path), digest_of(path), env=(("FROM_IMAGE", "yes"), ("HOME", "/nowhere")))


def sif_root() -> Root:
    """The same as a SIF file. Raises CheckSkipped where mksquashfs is not installed."""
    directory, path = directory_root(), _folder() / "root.sif"
    if not path.exists():
        program = shutil.which("mksquashfs", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        if program is None:
            raise CheckSkipped("mksquashfs is not installed (package squashfs-tools)")
        squashfs = _folder() / "root.squashfs"
        subprocess.run([program, directory.path, str(squashfs), "-quiet", "-no-progress"], check=True, capture_output=True)
        write_sif(squashfs, path)
    return Root(RootKind.SIF, str(path), hashlib.sha256(path.read_bytes()).hexdigest(), directory.env)


def digest_of(tree: Path) -> str:
    """Of everything in a directory tree: names, kinds, modes, owners, contents."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        status = path.lstat()
        digest.update(f"{path.relative_to(tree)}\0{status.st_mode}\0{status.st_uid}\0{status.st_mtime_ns}\0".encode())
        if path.is_symlink():
            digest.update(os.fsencode(path.readlink()))
        elif path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="prorl-selfcheck-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _make(path: Path) -> None:
    partial = path.with_name("partial")
    for name in _DIRECTORIES:
        (partial / name).mkdir(parents=True)
    programs = [Path(found) for name in _PROGRAMS if (found := shutil.which(name))]
    copies = {f"/bin/{program.name}": program for program in programs}
    copies |= {str(library): library for library in libraries_of(programs).values()}
    for target, source in copies.items():
        place = partial / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    for name, text in {**_FILES, FACT.lstrip("/"): TEXT, "srv/closed/file": TEXT}.items():
        (partial / name).write_text(text)
    (partial / "srv/link").symlink_to(FACT)
    (partial / "srv/closed").chmod(0o700)
    user = sandbox_user()
    for entry in (partial, *partial.rglob("*")):
        if user is not None:
            os.chown(entry, user, user, follow_symlinks=False)
    partial.rename(path)
