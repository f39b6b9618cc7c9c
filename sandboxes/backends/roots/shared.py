"""The root file systems of SIF files on this host: each mounted, or else unpacked, once for all its sandboxes. No Django.

Of each file there is a folder with `mount` or `rootfs`, and the file `users`, on which every sandbox holds a shared lock for as
long as its first process lives. So the kernel knows who uses it, whatever became of the processes that started them. Who gets
the exclusive lock may take it away: a mount as soon as it is unused, an unpacked one when all of them take too much room.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.backends.roots import squashfuse, unsquash
from sandboxes.backends.roots.sif import NotSif, root_partition
from sandboxes.backends.state import remove_tree
from sandboxes.errors import SandboxStartFailed

logger = logging.getLogger(__name__)

UNPACKED_BYTES = 20 * 1024**3  # of unpacked file systems, before unused ones make room
_LOCK, _USERS, _MOUNT, _ROOTFS, _PARTIAL, _SIZE, _FOREIGN = "lock", "users", "mount", "rootfs", "partial", "size", "foreign"


@dataclass(frozen=True)
class Held:
    """A directory that stays while the lock on the open file `fd` is held, by whichever process."""

    directory: Path
    fd: int

    def close(self) -> None:
        os.close(self.fd)


class SharedRoots:
    """Below `base`, a directory that is ours and that the sandboxes' host user can enter; `user` is that user, None for us."""

    def __init__(self, base: Path, user: int | None, *, unpacked_bytes: int = UNPACKED_BYTES) -> None:
        self._base = base
        self._user = user
        self._unpacked_bytes = unpacked_bytes

    def how(self) -> str:
        """ "squashfuse", "unpacked", or why SIF files cannot be used here."""
        mounting, unpacking = squashfuse.why_not(self._user), unsquash.why_not()
        if not mounting:
            return "squashfuse"
        return "unpacked" if not unpacking else f"none: {mounting}; {unpacking}"

    def hold(self, sif: Path, digest: str) -> Held:
        """The root file system of a SIF file; `digest` identifies its contents ("": its path and state do).

        Its files belong to the sandboxes' host user. Blocks: seconds where it is unpacked for the first time. Raises
        SandboxStartFailed.
        """
        try:
            folder = self._folder(sif, digest)
            with _locked(folder):
                users = os.open(folder / _USERS, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(users, fcntl.LOCK_SH)
                    return Held(self._provide(folder, sif), users)
                except BaseException:
                    os.close(users)
                    raise
        except (NotSif, squashfuse.MountFailed, unsquash.UnpackFailed, OSError) as error:
            raise SandboxStartFailed(f"this image cannot be used: {error}") from error

    def sweep(self) -> None:
        """Unmount what no sandbox uses. What stays mounted is only logged: whoever sweeps is done with a sandbox of another."""
        for folder in self._folders():
            if _has_mount(folder):
                try:
                    with _unused(folder) as unused:
                        if unused and _has_mount(folder):
                            squashfuse.unmount(folder / _MOUNT)
                            (folder / _MOUNT).rmdir()
                except (OSError, subprocess.SubprocessError) as error:
                    logger.warning("%s stays mounted: %s", folder / _MOUNT, error)

    def _provide(self, folder: Path, sif: Path) -> Path:
        unpacked, mount = folder / _ROOTFS, folder / _MOUNT
        if unpacked.exists():
            os.utime(folder / _SIZE)
            return unpacked
        partition = root_partition(sif)
        reason = squashfuse.why_not(self._user)
        if not reason and not (folder / _FOREIGN).exists():
            if not _has_mount(folder):
                mount.mkdir(mode=0o755)
            try:
                if not squashfuse.is_mounted(mount):
                    squashfuse.mount(sif, partition, mount, self._user)
                if mount.stat().st_uid == (os.geteuid() if self._user is None else self._user):
                    return mount
                squashfuse.unmount(mount)
                (folder / _FOREIGN).touch()  # an agent could not change files that are not its user's
                reason = "its files belong to others, and this squashfuse cannot make them belong to the sandboxes' user"
            except squashfuse.MountFailed as error:
                reason = str(error)
            mount.rmdir()
        if unsquash.why_not():
            raise SandboxStartFailed(f"{sif} is not mounted: {reason or 'its files belong to others'}; {unsquash.why_not()}")
        logger.info("unpacking %s: %s", sif, reason or "its files belong to others")
        self._make_room()
        partial = folder / _PARTIAL
        remove_tree(partial)  # of one who did not come to the end
        partial.mkdir(mode=0o700)
        if self._user is not None:
            os.chown(partial, self._user, self._user)
        try:
            unsquash.unpack(sif, partition, partial / _ROOTFS, self._user)
            (partial / _ROOTFS).chmod(0o755)
            (folder / _SIZE).write_text(str(_size_of(partial / _ROOTFS)))
            (partial / _ROOTFS).rename(unpacked)
        finally:
            remove_tree(partial)
        return unpacked

    def _make_room(self) -> None:
        """Remove unpacked file systems that no sandbox uses, the one unused for longest first, until they take less."""
        unpacked = [folder for folder in self._folders() if (folder / _ROOTFS).exists()]
        total = sum(int((folder / _SIZE).read_text()) for folder in unpacked)
        for folder in sorted(unpacked, key=lambda folder: (folder / _SIZE).stat().st_mtime):
            if total <= self._unpacked_bytes:
                return
            with _unused(folder) as unused:
                if unused:
                    total -= int((folder / _SIZE).read_text())
                    remove_tree(folder / _ROOTFS)

    def _folder(self, sif: Path, digest: str) -> Path:
        status = sif.stat()
        identity = digest or f"{sif}\0{status.st_dev}\0{status.st_ino}\0{status.st_mtime_ns}\0{status.st_size}"
        folder = self._base / hashlib.sha256(identity.encode()).hexdigest()[:24]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._user is not None:
            os.chown(folder, -1, self._user)
            folder.chmod(0o710)
        return folder

    def _folders(self) -> list[Path]:
        return [entry for entry in self._base.iterdir() if (entry / _USERS).exists()] if self._base.is_dir() else []


def _has_mount(folder: Path) -> bool:
    # By name only: to look at it would be to ask a program that may be dead, or just beginning.
    return _MOUNT in os.listdir(folder)  # noqa: PTH208


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """One at a time, over all processes of this host. Raises BlockingIOError."""
    fd = os.open(folder / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Whether no sandbox uses it, nor is about to; none begins to inside of the block."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(folder, wait=False))
            users = os.open(folder / _USERS, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, users)
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _size_of(tree: Path) -> int:
    """Bytes on disk; hard links count once."""
    seen: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(tree):
        for name in names:
            status = os.lstat(f"{parent}/{name}")
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())
