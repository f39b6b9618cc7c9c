"""Unpacking archives that nobody vouches for into a directory that nothing leaves. No Django.

Every name is taken apart and opened step by step from the root's own descriptor, never through a symbolic link: what an archive
says about links is stored, not followed. Absolute links are kept as they are, since they are meant for inside the image.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from sandboxes.images.errors import BadSource
from sandboxes.images.streams import DAMAGED, Readable

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"

_MOST_ENTRIES = 5_000_000
_CHUNK = 1 << 20
_KEPT_MODE = 0o1777  # no setuid, no setgid
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Unpacker:
    """Fills one root file system, one archive after the other.

    `owner` is the host user and group its files shall belong to, None for our own. `room` is how many bytes it may take.
    `check` is called often, and may raise to end it.
    """

    def __init__(self, root: Path, *, owner: int | None, room: int, check: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self._owner = owner
        self._room = room
        self._check = check
        self._entries = 0
        self.skipped = 0  # device nodes and the like

    def extract(self, archive: Readable, *, what: str, layer: bool = False) -> None:
        """Unpack a tar archive that is read forwards only. With `layer`, whiteouts in it remove what earlier archives brought.

        Raises BadSource, naming `what` and the entry, for anything that reaches out of the root and for damaged archives.
        """
        made: set[tuple[str, ...]] = set()
        root = os.open(self._root, _DIRECTORY_FLAGS)
        try:
            with tarfile.open(fileobj=cast(IO[bytes], archive), mode="r|", errors="surrogateescape") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # not in the stubs: it would keep them all
                    self._entry(root, tar, member, made if layer else None)
        except (tarfile.TarError, *DAMAGED) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise BadSource(f"{what} cannot be unpacked: {error.strerror}") from error
            raise BadSource(f"{what} is damaged, or no tar archive: {error}") from error
        except _Hostile as error:
            raise BadSource(f"{what}: {error}") from None
        finally:
            os.close(root)

    def _entry(self, root: int, tar: tarfile.TarFile, member: tarfile.TarInfo, made: set[tuple[str, ...]] | None) -> None:
        self._check()
        self._entries += 1
        if self._entries > _MOST_ENTRIES:
            raise _Hostile(f"it has more than {_MOST_ENTRIES} entries")
        parts = _parts(member.name, "entry")
        if not parts:
            if member.isdir():
                os.fchmod(root, member.mode & _KEPT_MODE | 0o700)
            return
        with self._parent(root, parts) as parent:
            name = parts[-1]
            if made is not None and name.startswith(WHITEOUT):
                self._white_out(parent, parts, made)
                return
            if made is not None:
                made.update(parts[:n] for n in range(1, len(parts) + 1))
            if member.isdir():
                self._directory(parent, name, member)
            elif member.isreg():
                self._file(parent, name, tar, member)
            elif member.issym():
                self._clear(parent, name)
                os.symlink(member.linkname, name, dir_fd=parent)
                self._own(parent, name, member)
            elif member.islnk():
                self._hard_link(root, parent, parts, member)
            else:
                self.skipped += 1

    @contextlib.contextmanager
    def _parent(self, root: int, parts: tuple[str, ...]) -> Iterator[int]:
        """The open directory that holds the entry; directories that the archive did not mention are made."""
        fd = os.dup(root)
        try:
            for depth, name in enumerate(parts[:-1], start=1):
                try:
                    inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=fd)
                except FileNotFoundError:
                    os.mkdir(name, 0o755, dir_fd=fd)
                    inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=fd)
                    os.fchmod(inner, 0o755)
                    if self._owner is not None:
                        os.fchown(inner, self._owner, self._owner)
                except OSError:
                    what = "a symbolic link" if _is_link(name, fd) else "no directory"
                    raise _Hostile(f"entry {'/'.join(parts)!r} leads through {'/'.join(parts[:depth])!r}, {what}") from None
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _directory(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=parent)
                os.mkdir(name, 0o755, dir_fd=parent)
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
        try:
            if self._owner is not None:
                os.fchown(fd, self._owner, self._owner)
            os.fchmod(fd, member.mode & _KEPT_MODE | 0o700)
        finally:
            os.close(fd)

    def _file(self, parent: int, name: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._room -= member.size
        if self._room < 0:
            raise BadSource("the image is larger than the space that is left for it")
        self._clear(parent, name)
        source = tar.extractfile(member)
        assert source is not None  # noqa: S101 - a regular file
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        with os.fdopen(fd, "wb") as target:
            while chunk := source.read(_CHUNK):
                self._check()
                target.write(chunk)
            if self._owner is not None:
                os.fchown(fd, self._owner, self._owner)
            os.fchmod(fd, member.mode & _KEPT_MODE | 0o400)
        os.utime(name, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)

    def _hard_link(self, root: int, parent: int, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        target = _parts(member.linkname, "hard link")
        if not target:
            raise _Hostile(f"hard link {'/'.join(parts)!r} leads to the root")
        if target == parts:
            return
        with self._parent(root, target) as there:
            try:
                kind = os.stat(target[-1], dir_fd=there, follow_symlinks=False).st_mode
            except FileNotFoundError:
                raise _Hostile(f"hard link {'/'.join(parts)!r} leads to {member.linkname!r}, which is not there") from None
            if stat.S_ISDIR(kind):
                raise _Hostile(f"hard link {'/'.join(parts)!r} leads to {member.linkname!r}, a directory")
            self._clear(parent, parts[-1])
            os.link(target[-1], parts[-1], src_dir_fd=there, dst_dir_fd=parent, follow_symlinks=False)

    def _white_out(self, parent: int, parts: tuple[str, ...], made: set[tuple[str, ...]]) -> None:
        """Whiteouts mean what earlier layers brought, wherever in the layer they stand."""
        name = parts[-1]
        if name == OPAQUE:
            doomed = [child for child in os.listdir(parent) if (*parts[:-1], child) not in made]
        else:
            hidden = name.removeprefix(WHITEOUT)
            if hidden in ("", ".", ".."):
                raise _Hostile(f"whiteout {'/'.join(parts)!r} names nothing")
            doomed = [] if (*parts[:-1], hidden) in made else [hidden]
        for child in doomed:
            self._clear(parent, child)

    @staticmethod
    def _clear(parent: int, name: str) -> None:
        """Make room for an entry of that name."""
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=parent)
        except PermissionError:  # what some file systems say of directories
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
            shutil.rmtree(name, dir_fd=parent)

    def _own(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=parent, follow_symlinks=False)
        os.utime(name, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)


def adopt(root: Path, *, owner: int | None, check: Callable[[], None] = lambda: None) -> None:
    """Make of a root file system that another program has unpacked what `Unpacker` makes: owner, permissions, no devices."""
    for _, directories, names, fd in os.fwalk(root, onerror=_raise):
        check()
        if owner is not None:
            os.fchown(fd, owner, owner)
        os.fchmod(fd, os.fstat(fd).st_mode & _KEPT_MODE | 0o700)
        for name in directories + names:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                if owner is not None:
                    os.chown(name, owner, owner, dir_fd=fd, follow_symlinks=False)
                os.chmod(name, status.st_mode & _KEPT_MODE | 0o400, dir_fd=fd)
            elif stat.S_ISDIR(status.st_mode):
                os.chmod(name, status.st_mode & _KEPT_MODE | 0o700, dir_fd=fd)  # so that it can be entered next
            elif stat.S_ISLNK(status.st_mode):
                if owner is not None:
                    os.chown(name, owner, owner, dir_fd=fd, follow_symlinks=False)
            else:
                os.unlink(name, dir_fd=fd)


def _raise(error: OSError) -> None:
    raise error


class _Hostile(Exception):
    """An entry that has no place in a root file system."""


def _parts(name: str, what: str) -> tuple[str, ...]:
    if name.startswith("/"):
        raise _Hostile(f"{what} {name!r} has an absolute path")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise _Hostile(f"{what} {name!r} leads upwards")
    return parts


def _is_link(name: str, parent: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
