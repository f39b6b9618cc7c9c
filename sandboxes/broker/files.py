"""The file verbs. Paths are the sandbox's; relative ones start at its home."""

from __future__ import annotations

# No pathlib in the broker: it is slow to import.
# ruff: noqa: PTH103, PTH116, PTH120, PTH123
import errno
import os
import stat

_MAX_ENTRIES = 20_000

_REASONS = {
    errno.ENOENT: "not_found",
    errno.EISDIR: "is_directory",
    errno.ENOTDIR: "not_a_directory",
    errno.EEXIST: "not_a_directory",  # a parent of the path is a file
    errno.ENXIO: "not_a_file",  # a pipe that nobody reads, a socket
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.EFBIG: "too_large",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
}


class FileFailure(Exception):
    """A file request that cannot be carried out; `reason` as in `sandboxes.errors.SandboxFileError`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def of(cls, error: OSError, path: str) -> FileFailure:
        return cls(_REASONS.get(error.errno or 0, "other"), f"{error.strerror}: {path!r}")


def read(path: str, max_bytes: int) -> bytes:
    """The whole of a regular file of at most `max_bytes`. Raises FileFailure."""
    try:
        fd = open_regular(path, os.O_RDONLY)
        with open(fd, "rb", buffering=0) as file:
            data = bytearray()
            while chunk := file.read(min(max_bytes + 1 - len(data), 1 << 20)):
                data += chunk
    except OSError as error:
        raise FileFailure.of(error, path) from None
    if len(data) > max_bytes:
        raise FileFailure("too_large", f"more than {max_bytes} bytes: {path!r}")
    return bytes(data)


def write(path: str, data: bytes, max_bytes: int) -> None:
    """Replace a file's contents; missing parent directories are created. Raises FileFailure."""
    if len(data) > max_bytes:
        raise FileFailure("too_large", f"{len(data)} bytes are more than the {max_bytes} a file may have: {path!r}")
    try:
        make_parents(path)
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT)
        with open(fd, "wb", buffering=0) as file:
            file.truncate(0)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except OSError as error:
        raise FileFailure.of(error, path) from None


def list_directory(path: str) -> bytes:
    """The entries of a directory by name, links not followed: `KIND SIZE PATH` and a NUL for each. Raises FileFailure."""
    entries: dict[bytes, bytes] = {}
    try:
        with os.scandir(os.fsencode(path)) as found:
            for entry in found:
                if len(entries) == _MAX_ENTRIES:
                    raise FileFailure("too_large", f"more than {_MAX_ENTRIES} entries: {path!r}")
                status = entry.stat(follow_symlinks=False)
                entries[entry.path] = b"%s %d %s\0" % (_kind(status.st_mode), status.st_size, entry.path)
    except OSError as error:
        raise FileFailure.of(error, path) from None
    return b"".join(entries[name] for name in sorted(entries))


def make_parents(path: str) -> None:
    """Raises OSError."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)


def open_regular(path: str, flags: int) -> int:
    """A descriptor of a regular file, and of nothing else. Raises OSError, FileFailure."""
    # Without waiting: opening a pipe would otherwise stop the broker until somebody opens its other end.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and not _is_of_broker(status):
        return fd
    os.close(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise FileFailure("not_a_file", f"not a regular file: {path!r}")


def _is_of_broker(status: os.stat_result) -> bool:
    # Whatever a path says, it is the broker that opens it: to the broker /proc/self is the broker, and /proc/self/fd has the
    # log that it writes on the host, and files without a name. Links lead there, too, so what counts is what was opened.
    if status.st_nlink == 0 or status.st_dev == os.stat("/proc").st_dev:
        return True
    return any(os.path.samestat(status, os.fstat(fd)) for fd in (1, 2))


def _kind(mode: int) -> bytes:
    if stat.S_ISREG(mode):
        return b"file"
    if stat.S_ISDIR(mode):
        return b"directory"
    return b"symlink" if stat.S_ISLNK(mode) else b"other"
