"""Files in pieces: both ends hold a few of them at a time, whatever the size of the file.

A download is asked for with `{"id": 7, "verb": "download", "path": ...}`. The broker sends TRANSFER_WINDOW pieces as frames
`{"id": 7, "more": true}`, and another one for each such frame from the host; the answer follows the last piece. An upload goes
the other way: the host sends pieces, at most TRANSFER_WINDOW more than it got frames from the broker, and `"end": true` with
the last one. The file has its name only then: until it is whole its bytes are in another one beside it.
"""

from __future__ import annotations

# No pathlib in the broker: it is slow to import.
# ruff: noqa: PTH104, PTH108, PTH118, PTH120
import errno
import os
import stat

from .files import FileFailure, make_parents, open_regular
from .framing import TRANSFER_PIECE, TRANSFER_WINDOW
from .lean import suppress
from .tool import BadRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .server import Request

_MOST = 64  # at a time, as each has a file open


class Transfers:
    """All transfers of a sandbox."""

    def __init__(self, max_file_bytes: int) -> None:
        self.max_file_bytes = max_file_bytes
        self.running: set[_Transfer] = set()

    def download(self, request: Request, path: str) -> None:
        """Raises FileFailure, BadRequest."""
        self._check_number()
        _Download(self, request, path).begin()

    def upload(self, request: Request, path: str) -> None:
        """Raises FileFailure, BadRequest."""
        self._check_number()
        _Upload(self, request, path).begin()

    def _check_number(self) -> None:
        if len(self.running) >= _MOST:
            raise BadRequest(f"more than {_MOST} transfers at a time")


class _Transfer:
    """One file on its way, until the request is answered."""

    def __init__(self, transfers: Transfers, request: Request, path: str) -> None:
        self._transfers = transfers
        self._request = request
        self._path = path
        self._fd = -1

    def begin(self) -> None:
        """Raises FileFailure."""
        try:
            self._open()
        except OSError as error:
            raise FileFailure.of(error, self._path) from None
        self._transfers.running.add(self)
        self._request.on_cancel = self._cancel
        self._request.on_more = self._step

    def _step(self, header: dict[str, Any], payload: bytes) -> None:
        try:
            self._go_on(header, payload)
        except OSError as error:
            self._end()
            raise FileFailure.of(error, self._path) from None
        except FileFailure:
            self._end()
            raise

    def _cancel(self) -> None:
        self._end()
        self._request.fail("cancelled", "cancelled")

    def _end(self) -> None:
        self._transfers.running.discard(self)
        os.close(self._fd)

    def _open(self) -> None:
        raise NotImplementedError

    def _go_on(self, header: dict[str, Any], payload: bytes) -> None:
        raise NotImplementedError


class _Download(_Transfer):
    def begin(self) -> None:
        super().begin()
        for _ in range(TRANSFER_WINDOW):
            if self in self._transfers.running:
                self._step({}, b"")

    def _open(self) -> None:
        self._fd = open_regular(self._path, os.O_RDONLY)

    def _go_on(self, header: dict[str, Any], payload: bytes) -> None:
        data = os.read(self._fd, TRANSFER_PIECE)
        if data:
            self._request.send_more({}, data)
        else:
            self._end()
            self._request.answer({})


class _Upload(_Transfer):
    def _open(self) -> None:
        make_parents(self._path)
        self._target = os.path.realpath(self._path)
        self._mode = self._mode_of_target()
        self._size = 0
        self._partial = os.path.join(os.path.dirname(self._target), f".upload-{os.urandom(8).hex()}")
        self._fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def _mode_of_target(self) -> int | None:
        """Permissions of the file that is replaced, if any."""
        try:
            mode = os.lstat(self._target).st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        os.close(open_regular(self._target, os.O_WRONLY))
        return mode & 0o777

    def _go_on(self, header: dict[str, Any], payload: bytes) -> None:
        self._size += len(payload)
        if self._size > self._transfers.max_file_bytes:
            most = self._transfers.max_file_bytes
            raise FileFailure("too_large", f"more than the {most} bytes a file may have: {self._path!r}")
        view = memoryview(payload)
        while view:
            view = view[os.write(self._fd, view) :]
        if header.get("end") is not True:
            self._request.send_more({})
            return
        if self._mode is not None:
            os.fchmod(self._fd, self._mode)
        os.rename(self._partial, self._target)
        self._end()
        self._request.answer({})

    def _end(self) -> None:
        super()._end()
        with suppress(OSError):  # it has its name, or was removed inside
            os.unlink(self._partial)
