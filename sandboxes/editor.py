"""Viewing and changing text files of a sandbox, exactly or not at all. One `Editor` belongs to one rollout. No Django."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from sandboxes.edits import Change, EditError, around, count_lines, insertion, numbered, replacement
from sandboxes.errors import SandboxFileError
from sandboxes.protocol import FileEntry, Session

_MAX_FILE_BYTES = 2 * 1024 * 1024
_MAX_UNDO = 100

_UNDECODED = re.compile("[\udc80-\udcff]")

_REASONS = {
    "not_found": "{path} does not exist.",
    "is_directory": "{path} is a directory.",
    "not_a_directory": "A parent of {path} is not a directory.",
    "not_a_file": "{path} is not a regular file.",
    "permission": "{path} cannot be accessed: permission denied.",
    "no_space": "There is no space left to write {path}.",
}


class _Edit(NamedTuple):
    """What an edit did to a file's bytes, and the digest of what came of it."""

    path: str
    at: int
    removed: bytes
    inserted: bytes
    digest: bytes


class Editor:
    """Every method returns what to show for it, and raises `EditError` when it changed nothing; otherwise as `Session` does.

    Paths begin with "/" or "~". What is shown of a file has at most about `max_view_chars` characters. Bytes that are not
    UTF-8, line endings, a missing last line ending and the file's mode survive an edit.
    """

    def __init__(self, session: Session, *, max_view_chars: int = 7000) -> None:
        self._session = session
        self._max_view_chars = max_view_chars
        self._edits: deque[_Edit] = deque(maxlen=_MAX_UNDO)

    async def view(self, path: str, first: int = 1, last: int = -1) -> str:
        """A file's lines from `first` to `last` (-1: the end) with their numbers, or two levels of a directory."""
        _check_path(path)
        try:
            data = await self._read(path)
        except IsADirectoryError:
            if (first, last) != (1, -1):
                raise EditError(f"view_range is for files, and {path} is a directory.") from None
            return await self._listing(path)
        text = _decode(data, path)
        length = count_lines(text)
        end = length if last == -1 else last
        if not text and (first, end) == (1, 0):
            return "[the file is empty]"
        if not 1 <= first <= min(end, length):
            raise EditError(
                f"view_range [{first}, {last}] is not in the file, which has {length} lines: "
                "it is the first and the last line to show, from 1, or -1 for the last one."
            )
        shown = numbered(_printable(text), first, min(end, length), self._max_view_chars)
        return shown if end <= length else f"{shown}\n[the file has {length} lines]"

    async def create(self, path: str, text: str) -> str:
        """Write a new file, and the directories that it needs."""
        _check_path(path)
        try:
            await self._session.read_file(path, max_bytes=1)
        except SandboxFileError as error:
            if error.reason == "not_found":
                await self._write(path, text.encode())
                return f"Created {path} with {count_lines(text)} lines."
            if error.reason != "too_large":
                raise _refusal(error, path) from None
        raise EditError(f"{path} exists already. Change it with str_replace or insert, or remove it first.")

    async def replace(self, path: str, old: str, new: str) -> str:
        """Put `new` where `old` is, which must be exactly once."""
        text = await self._text(path)
        return await self._change(path, text, replacement(text, old, new))

    async def insert(self, path: str, line: int, new: str) -> str:
        """Add lines after line `line`, 0 being the beginning of the file."""
        text = await self._text(path)
        return await self._change(path, text, insertion(text, line, new))

    async def undo(self, path: str) -> str:
        """Take back the last of this editor's edits of a file that was not taken back yet."""
        _check_path(path)
        key = posixpath.normpath(path)
        place = max((place for place, edit in enumerate(self._edits) if edit.path == key), default=None)
        if place is None:
            raise EditError(f"There is no edit of {path} to undo.")
        edit = self._edits[place]
        data = await self._existing(path)
        if hashlib.sha256(data).digest() != edit.digest:
            raise EditError(f"{path} was changed by something else after the last edit, so that cannot be undone.")
        before = data[: edit.at] + edit.removed + data[edit.at + len(edit.inserted) :]
        await self._write(path, before)
        del self._edits[place]
        change = Change(len(_text(data[: edit.at])), _text(edit.inserted), _text(edit.removed))
        return f"Took back the last edit of {path}:\n{around(_printable(_text(before)), change, self._max_view_chars)}"

    # Files.

    async def _change(self, path: str, text: str, change: Change) -> str:
        changed = change.apply(text)
        data = _bytes(changed)
        await self._write(path, data)
        digest = hashlib.sha256(data).digest()
        at = len(_bytes(text[: change.at]))
        self._edits.append(_Edit(posixpath.normpath(path), at, _bytes(change.removed), _bytes(change.inserted), digest))
        return f"Edited {path}:\n{around(_printable(changed), change, self._max_view_chars)}"

    async def _text(self, path: str) -> str:
        _check_path(path)
        return _decode(await self._existing(path), path)

    async def _existing(self, path: str) -> bytes:
        try:
            return await self._read(path)
        except IsADirectoryError:
            raise EditError(f"{path} is a directory. Only view takes directories.") from None

    async def _read(self, path: str) -> bytes:
        """Raises IsADirectoryError for a directory."""
        try:
            return await self._session.read_file(path, max_bytes=_MAX_FILE_BYTES)
        except SandboxFileError as error:
            if error.reason == "is_directory":
                raise IsADirectoryError from None
            if error.reason == "too_large":
                limit = f"{_MAX_FILE_BYTES // 1024 // 1024} MiB"
                raise EditError(f"{path} is larger than {limit}, the most that edit takes. Use a shell command.") from None
            raise _refusal(error, path) from None

    async def _write(self, path: str, data: bytes) -> None:
        try:
            await self._session.upload(path, _pieces(data))  # unlike `write_file`, whole or not at all
        except SandboxFileError as error:
            raise _refusal(error, path) from None

    # Directories.

    async def _listing(self, path: str) -> str:
        lines: list[str] = []
        hidden = size = 0
        for entry in await self._entries(path):
            children: list[FileEntry] = []
            unreadable = False
            if entry.kind == "directory" and not _is_hidden(entry):
                try:
                    children = await self._entries(entry.path)
                except EditError:
                    unreadable = True
            hidden += sum(map(_is_hidden, [entry, *children]))
            found = [_line(each) for each in [entry, *children] if not _is_hidden(each)]
            if unreadable:
                found[0] += " [cannot be read]"
            lines += found
            size += sum(len(line) + 1 for line in found)
            if size > self._max_view_chars:
                return "\n".join([*_fitting(lines, self._max_view_chars), "[the rest is not shown; view a directory of it]"])
        if hidden:
            lines.append(f"[{hidden} hidden entries are not shown]")
        return "\n".join(lines) or "[the directory is empty]"

    async def _entries(self, path: str) -> list[FileEntry]:
        try:
            return await self._session.list_files(path)
        except SandboxFileError as error:
            raise _refusal(error, path) from None


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _is_hidden(entry: FileEntry) -> bool:
    return posixpath.basename(entry.path).startswith(".")


def _line(entry: FileEntry) -> str:
    return _printable(entry.path) + ("/" if entry.kind == "directory" else "")


def _fitting(lines: list[str], max_chars: int) -> list[str]:
    size = 0
    for number, line in enumerate(lines):
        size += len(line) + 1
        if size > max_chars and number:
            return lines[:number]
    return lines


def _check_path(path: str) -> None:
    if not path.startswith(("/", "~")):
        raise EditError(f"The path {path!r} is not absolute. Begin it with /, or with ~ for the home directory.")


def _refusal(error: SandboxFileError, path: str) -> EditError:
    reason = _REASONS.get(error.reason)
    return EditError(reason.format(path=path) if reason else str(error))


def _decode(data: bytes, path: str) -> str:
    if b"\0" in data:
        raise EditError(f"{path} is a binary file (it has NUL bytes), which edit cannot show or change.")
    return _text(data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _printable(text: str) -> str:
    """Bytes that are not UTF-8 become replacement characters, as many as there are characters in `text`."""
    return _UNDECODED.sub("\ufffd", text)
