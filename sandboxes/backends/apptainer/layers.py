"""What a sandbox has of its own in its root: a directory with a few files and mount points, to lay over an image. No Django.

The root of a sandbox without an image is such a directory alone, with parts of the host bound into it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandboxes.backends.staging import make_once, shared_folder

# Programs and libraries, and the little of /etc that they need; what is no directory there is copied.
_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SHARED_ETC = ("alternatives", "ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")
_COPIED_ETC = ("ld.so.cache", "localtime")
_MOUNT_POINTS = ("/dev", "/proc", "/sys", "/tmp", "/run", "/var/tmp", "/home")  # noqa: S108 - inside


def host_root(texts: Mapping[str, str]) -> tuple[Path, list[str]]:
    """(a directory with `texts`, by path inside, and the host's directories to bind into it at the same paths)."""
    links = {f"/{name}": str(Path(f"/{name}").readlink()) for name in _TOP_LEVEL if Path(f"/{name}").is_symlink()}
    bound = ["/usr", *(f"/{name}" for name in _TOP_LEVEL if f"/{name}" not in links and Path(f"/{name}").is_dir())]
    bound += [f"/etc/{name}" for name in _SHARED_ETC if Path(f"/etc/{name}").is_dir()]
    files = {f"/etc/{name}": Path(f"/etc/{name}").read_bytes() for name in _COPIED_ETC if Path(f"/etc/{name}").is_file()}
    files |= {path: text.encode() for path, text in texts.items()}
    return _layer(files, [*_MOUNT_POINTS, *bound], links, None), bound


def image_layer(texts: Mapping[str, str], directories: Sequence[str], user: int | None) -> Path:
    """A directory with these; all of it belongs to `user`, so that the agent can change it like the rest of its image."""
    files = {path: text.encode(errors="surrogateescape") for path, text in texts.items()}
    return _layer(files, directories, {}, user)


def _layer(files: Mapping[str, bytes], directories: Sequence[str], links: Mapping[str, str], user: int | None) -> Path:
    """Made once for each contents, for all sandboxes of this user; never written to."""
    contents = repr((sorted(files.items()), sorted(directories), sorted(links.items()), user))

    def fill(partial: Path) -> None:
        for path in [*directories, *(str(Path(file).parent) for file in files)]:
            (partial / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            (partial / path.lstrip("/")).write_bytes(data)
        for made in (partial, *partial.rglob("*")):
            made.chmod(0o755 if made.is_dir() or made.parent.name == "actions" else 0o644)  # whatever the umask is
            if user is not None:
                os.chown(made, user, user)
        for path, destination in links.items():
            (partial / path.lstrip("/")).symlink_to(destination)

    return make_once(shared_folder() / f"{hashlib.sha256(contents.encode()).hexdigest()[:24]}-layer", fill)
