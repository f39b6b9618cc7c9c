"""The root for sandboxes without an image: a directory with nothing but places for parts of the host. No Django."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from sandboxes.backends.staging import shared_folder

# Programs and libraries, and the little of /etc that they need. What is no directory here is copied.
_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SHARED_ETC = ("alternatives", "ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")
_COPIED_ETC = ("ld.so.cache", "localtime")
_EMPTY = ("dev", "proc", "sys", "tmp", "run", "var/tmp", "home", "usr", "etc", ".singularity.d/env")


def host_skeleton(files: dict[str, str]) -> tuple[Path, list[str]]:
    """(the directory, the host's directories to bind at the same paths); `files` maps paths inside to their contents.

    Made once for each state of the host and `files`, for all sandboxes of this user; it is never written to.
    """
    links = {name: str(Path(f"/{name}").readlink()) for name in _TOP_LEVEL if Path(f"/{name}").is_symlink()}
    directories = ["/usr", *(f"/{name}" for name in _TOP_LEVEL if name not in links and Path(f"/{name}").is_dir())]
    directories += [f"/etc/{name}" for name in _SHARED_ETC if Path(f"/etc/{name}").is_dir()]
    copies = {f"/etc/{name}": Path(f"/etc/{name}").read_bytes() for name in _COPIED_ETC if Path(f"/etc/{name}").is_file()}
    contents = {**copies, **{path: text.encode() for path, text in files.items()}}
    key = hashlib.sha256(repr((sorted(links.items()), directories, sorted(contents.items()))).encode()).hexdigest()[:24]
    target = shared_folder() / f"{key}-host"
    if not target.exists():
        partial = Path(tempfile.mkdtemp(dir=target.parent))
        _fill(partial, links, directories, contents)
        try:
            partial.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(partial)
            if not target.exists():
                raise
    return target, directories


def _fill(root: Path, links: dict[str, str], directories: list[str], contents: dict[str, bytes]) -> None:
    root.chmod(0o755)
    for name in (*_EMPTY, *directories):
        _make_directory(root, root / name.lstrip("/"))
    for name, target in links.items():
        (root / name).symlink_to(target)
    for path, data in contents.items():
        file = root / path.lstrip("/")
        _make_directory(root, file.parent)
        file.write_bytes(data)
        file.chmod(0o644)


def _make_directory(root: Path, path: Path) -> None:
    """Open to all, its parents too, whatever the umask is."""
    if path != root and not path.exists():
        _make_directory(root, path.parent)
        path.mkdir()
        path.chmod(0o755)
