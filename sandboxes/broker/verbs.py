"""What a host can ask for: arguments are checked here, and handed to the tools and the files."""

from __future__ import annotations

import os

from . import files
from .framing import MAX_PAYLOAD
from .tool import Job, Settings, Tool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .server import Request

_MAX_TIMEOUT = 7 * 24 * 3600.0
_MAX_ENV_BYTES = 4096  # far below what a pipe takes without a reader


class BadRequest(Exception):
    """A well-formed frame that asks for something impossible."""


class Verbs:
    """The verbs of tools and files."""

    def __init__(self, settings: Settings, tools: Mapping[str, Tool]) -> None:
        self._settings = settings
        self._tools = tools

    def table(self) -> dict[str, Callable[[Request], None]]:
        return {
            "ping": lambda request: request.answer({}),
            "env": self._set_env,
            "bash": lambda request: self._run(self._tools["bash"], request),
            "python": lambda request: self._run(self._tools["python"], request),
            "read": self._read,
            "write": self._write,
            "list": self._list,
        }

    def _set_env(self, request: Request) -> None:
        variables = _variables(request.header)
        self._settings.env.update(variables)
        for tool in self._tools.values():
            tool.note_env(variables)
        request.answer({})

    def _run(self, tool: Tool, request: Request) -> None:
        job = Job(_code(request.payload), number(request.header, "timeout", _MAX_TIMEOUT), request.answer)
        request.on_cancel = lambda: tool.cancel(job)
        tool.submit(job)

    def _read(self, request: Request) -> None:
        max_bytes = number(request.header, "max_bytes", MAX_PAYLOAD)
        request.answer({}, files.read(_path(request.header), int(max_bytes)))

    def _write(self, request: Request) -> None:
        files.write(_path(request.header), request.payload, self._settings.max_file_bytes)
        request.answer({})

    def _list(self, request: Request) -> None:
        request.answer({"entries": files.list_directory(_path(request.header))})


def number(header: Mapping[str, Any], key: str, most: float) -> float:
    """The number above 0 and at most `most` that `header` has as `key`. Raises BadRequest."""
    value: Any = header.get(key)
    if type(value) not in (int, float) or not 0 < value <= most:
        raise BadRequest(f"{key} is a number above 0 and at most {most:g}")
    return float(value)


def _code(payload: bytes) -> str:
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest("the code is not UTF-8") from None
    if "\0" in text:
        raise BadRequest("the code contains a NUL character")
    return text


def _path(header: Mapping[str, Any]) -> str:
    path = header.get("path")
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadRequest("a path is a non-empty string without NUL")
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib is slow to import


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _variables(header: Mapping[str, Any]) -> dict[str, str]:
    given: Any = header.get("variables")
    variables: dict[str, Any] = given if isinstance(given, dict) else {"": None}
    for name, value in variables.items():
        if not (name.isascii() and name.isidentifier() and isinstance(value, str) and _is_text(value)):
            raise BadRequest("variables map names to texts without NUL")
    if sum(len(name) + len(value.encode()) for name, value in variables.items()) > _MAX_ENV_BYTES:
        raise BadRequest(f"variables take at most {_MAX_ENV_BYTES} bytes together")
    return variables
