"""Where images are kept: one directory each, named by its contents, complete or absent. No Django.

    STORE/sha256-…/rootfs/ or image.sif, and manifest.json      an entry
    STORE/tmp/NAME/                                              what is being built or removed
    STORE/logs/                                                  of builds

Several nodes may share it. What is being built has its name chosen by the caller, who knows which of them are still wanted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sandboxes.backends.state import remove_tree
from sandboxes.images.digest import Contents
from sandboxes.images.states import Format
from sandboxes.protocol import Root, RootKind

_DIGEST = re.compile(r"sha256-[0-9a-f]{64}")
_MANIFEST = "manifest.json"
_PAYLOAD = {Format.DIRECTORY: "rootfs", Format.SIF: "image.sif"}
_ROOT_KIND = {Format.DIRECTORY: RootKind.DIRECTORY, Format.SIF: RootKind.SIF}
# What was added (again) this recently may be about to be noted somewhere.
_SETTLED_SECONDS = 3600.0


@dataclass(frozen=True)
class Entry:
    """An image in the store. `env` are the variables that it sets; `labels` is what it says of itself."""

    digest: str
    format: Format
    size: int  # bytes
    path: Path  # of its root file system or SIF file
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Root:
        """As a backend takes it."""
        return Root(_ROOT_KIND[self.format], str(self.path), self.digest, tuple(self.env.items()))


class Store:
    """The entries below one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tmp = folder / "tmp"

    def find(self, digest: str) -> Entry | None:
        """The entry of that digest, if this host has it."""
        folder = self._folder_of(digest)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except FileNotFoundError:
            return None
        format = Format(manifest["format"])
        return Entry(
            digest, format, manifest["size"], folder / _PAYLOAD[format], dict(manifest["env"]), dict(manifest["labels"])
        )

    def digests(self) -> list[str]:
        """Of all entries."""
        if not self.folder.is_dir():
            return []
        return sorted(entry.name for entry in self.folder.iterdir() if _DIGEST.fullmatch(entry.name))

    def add(
        self, path: Path, format: Format, contents: Contents, *, env: Mapping[str, str], labels: Mapping[str, str]
    ) -> Entry:
        """Take over a root file system or SIF file, which lies in a workspace. Where the same is there already, that stays."""
        entry = Entry(contents.digest, format, contents.size, path, env, labels)
        target = self._folder_of(contents.digest)
        with self._locked():
            if self.find(contents.digest) is None:
                partial = path.parent / f"entry-{secrets.token_hex(4)}"
                partial.mkdir()
                partial.chmod(0o755)  # whatever the umask is: sandboxes run as another user
                path.rename(partial / _PAYLOAD[format])
                document = {key: value for key, value in asdict(entry).items() if key not in ("path", "digest")}
                _write_durably(partial / _MANIFEST, json.dumps(document, indent=1))
                partial.rename(target)
            else:
                os.utime(target / _MANIFEST)
        found = self.find(contents.digest)
        assert found is not None  # noqa: S101 - too young to be removed
        return found

    def detach(self, digest: str) -> Path | None:
        """Take an entry out at once; where its files are now, to be removed. None: it was added just now, or is gone."""
        folder = self._folder_of(digest)
        self._make_folders()
        with self._locked():
            try:
                if time.time() - (folder / _MANIFEST).stat().st_mtime < _SETTLED_SECONDS:
                    return None
            except FileNotFoundError:
                return None
            return folder.rename(self._tmp / f"removed-{secrets.token_hex(4)}")

    @contextlib.contextmanager
    def workspace(self, name: str) -> Iterator[Path]:
        """An empty directory on the store's file system, removed afterwards."""
        folder = self._tmp / name
        self._make_folders()
        remove_tree(folder)
        folder.mkdir()
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            remove_tree(folder)

    def leftovers(self) -> list[str]:
        """Names of all workspaces, and of entries that are being removed."""
        return sorted(folder.name for folder in self._tmp.iterdir()) if self._tmp.is_dir() else []

    def discard(self, leftover: str) -> None:
        """Remove one of the `leftovers`."""
        remove_tree(self._tmp / leftover)

    def log_path(self, image: str, number: int) -> Path:
        """Where the whole log of a build is."""
        self._make_folders()
        return self.folder / "logs" / f"{image}.{number}.log"

    def free_bytes(self) -> int:
        """What this user may still write."""
        self._make_folders()
        return shutil.disk_usage(self.folder).free

    def _folder_of(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"not a digest: {digest!r}")
        return self.folder / digest

    def _make_folders(self) -> None:
        for folder in (self.folder, self._tmp, self.folder / "logs"):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o755)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Adding and removing exclude each other. Where a file system has no locks, the hour's patience has to do."""
        with (self.folder / "lock").open("ab") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o644)
