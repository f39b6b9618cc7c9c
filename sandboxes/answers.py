"""What a broker's answers mean. A broker may be in the hands of what runs inside: what is not as it should be is refused."""

from __future__ import annotations

from typing import Any

from sandboxes.broker.pictures import MIME_TYPES
from sandboxes.errors import SandboxProtocolError
from sandboxes.protocol import CommandResult, FileEntry, Picture, PythonResult

_KINDS = ("file", "directory", "symlink", "other")


def command_result(header: dict[str, Any], payload: bytes) -> CommandResult:
    """The answer to `bash` and `bash_input`. Raises SandboxProtocolError, as all functions here."""
    timed_out, running = _flag(header, "timed_out"), _flag(header, "running")
    limit_exceeded = _text(header, "limit_exceeded")
    has_ended_by_itself = not (timed_out or running or limit_exceeded)
    return CommandResult(
        exit_code=_size(header, "exit_code") if has_ended_by_itself else None,
        output=payload.decode("utf-8", "replace"),
        cwd=_text(header, "cwd"),
        duration=_seconds(header, "duration"),
        timed_out=timed_out,
        truncated_bytes=_size(header, "truncated_bytes"),
        restarted=_flag(header, "restarted"),
        running=running,
        limit_exceeded=limit_exceeded,
    )


def python_result(header: dict[str, Any], payload: bytes) -> PythonResult:
    """The answer to `python`: its payload is the value's repr, the traceback, the pictures, and the output."""
    parts = _Parts(payload)
    value, error = (None if header.get(key) is None else parts.text(_size(header, key)) for key in ("value", "error"))
    pictures = tuple(_picture(described, parts) for described in _list(header, "pictures"))
    return PythonResult(
        output=parts.text(len(payload)),
        value=value,
        error=error,
        duration=_seconds(header, "duration"),
        timed_out=_flag(header, "timed_out"),
        truncated_bytes=_size(header, "truncated_bytes"),
        restarted=_flag(header, "restarted"),
        limit_exceeded=_text(header, "limit_exceeded"),
        pictures=pictures,
    )


def file_entries(payload: bytes) -> list[FileEntry]:
    """The answer to `list`: for each entry `KIND SIZE PATH` and a NUL."""
    entries = []
    *lines, unfinished = payload.split(b"\0")
    if unfinished:
        raise SandboxProtocolError("a listing that ends within an entry")
    for line in lines:
        kind, _, rest = line.decode("utf-8", "surrogateescape").partition(" ")
        size, _, path = rest.partition(" ")
        if kind not in _KINDS or not size.isdecimal() or len(size) > 20:
            raise SandboxProtocolError("a listing with something that is no entry")
        entries.append(FileEntry(path=path, kind=kind, size=int(size)))
    return entries


class _Parts:
    """Takes a payload apart, from its beginning."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._taken = 0

    def take(self, size: int) -> bytes:
        part = self._payload[self._taken : self._taken + size]
        self._taken += len(part)
        return part

    def text(self, size: int) -> str:
        return self.take(size).decode("utf-8", "replace")


def _picture(described: object, parts: _Parts) -> Picture:
    if not isinstance(described, list) or len(described) != 2 or described[0] not in MIME_TYPES or not _is_size(described[1]):
        raise SandboxProtocolError("a picture that is none")
    return Picture(mime=described[0], data=parts.take(described[1]))


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _size(header: dict[str, Any], key: str) -> int:
    return int(_checked(header, key, _is_size(header.get(key))))


def _seconds(header: dict[str, Any], key: str) -> float:
    value = header.get(key)
    return float(_checked(header, key, type(value) in (int, float) and 0 <= float(value or 0) < 1e10))


def _flag(header: dict[str, Any], key: str) -> bool:
    return bool(_checked(header, key, type(header.get(key)) is bool))


def _text(header: dict[str, Any], key: str) -> str:
    return str(_checked(header, key, isinstance(header.get(key), str)))


def _list(header: dict[str, Any], key: str) -> list[object]:
    return list(_checked(header, key, isinstance(header.get(key), list)))


def _checked(header: dict[str, Any], key: str, is_right: bool) -> Any:
    if not is_right:
        raise SandboxProtocolError(f"an answer whose {key} is {header.get(key)!r:.100}")
    return header[key]
