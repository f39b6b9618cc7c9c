"""What a host can ask for: arguments are checked here, and handed to the tools and the files."""

from __future__ import annotations

import os

from . import files
from .framing import MAX_PAYLOAD
from .output import LiveOutput
from .tool import BadRequest, Call, Job
from .transfers import Transfers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .interpreter import Interpreter
    from .loop import Loop
    from .server import Request
    from .shell import Shell
    from .tool import Settings, Tool

_MAX_TIMEOUT = 7 * 24 * 3600.0
_MAX_ENV_BYTES = 4096  # far below what a pipe takes without a reader


class Verbs:
    """The verbs of tools and files."""

    def __init__(self, loop: Loop, settings: Settings, shell: Shell, interpreter: Interpreter) -> None:
        self._loop = loop
        self._settings = settings
        self._shell = shell
        self._interpreter = interpreter
        self._transfers = Transfers(settings.max_file_bytes)

    def table(self) -> dict[str, Callable[[Request], None]]:
        return {
            "env": self._set_env,
            "bash": lambda request: self._run(self._shell, request),
            "bash_input": self._type,
            "python": lambda request: self._run(self._interpreter, request),
            "interrupt_python": self._interrupt,
            "restart_python": lambda request: self._interpreter.restart(lambda: request.answer({})),
            "read": self._read,
            "write": self._write,
            "list": lambda request: request.answer({}, files.list_directory(_path(request.header))),
            "download": lambda request: self._transfers.download(request, _path(request.header)),
            "upload": lambda request: self._transfers.upload(request, _path(request.header)),
        }

    def _set_env(self, request: Request) -> None:
        variables = _variables(request.header)
        self._settings.env.update(variables)
        for tool in (self._shell, self._interpreter):
            tool.note_env(variables)
        request.answer({})

    def _run(self, tool: Tool, request: Request) -> None:
        timeout, leaves_nothing = _number(request.header, "timeout", _MAX_TIMEOUT), request.header.get("leaves_nothing") is True
        job = Job(_code(request.payload), timeout, self._call(request), leaves_nothing=leaves_nothing)
        request.on_cancel = lambda: tool.cancel(job)
        tool.submit(job)

    def _type(self, request: Request) -> None:
        timeout = _number(request.header, "timeout", _MAX_TIMEOUT)
        request.on_cancel = self._shell.cancel_running
        self._shell.type(request.payload, timeout, self._call(request))

    def _call(self, request: Request) -> Call:
        header = request.header
        quiet_timeout = None if header.get("quiet_timeout") is None else _number(header, "quiet_timeout", _MAX_TIMEOUT)
        live = LiveOutput(self._loop, request, self._settings.output_bytes) if header.get("live") is True else None
        return Call(request.answer, request.connection, live, quiet_timeout)

    def _interrupt(self, request: Request) -> None:
        self._interpreter.interrupt()
        request.answer({})

    def _read(self, request: Request) -> None:
        max_bytes = _number(request.header, "max_bytes", MAX_PAYLOAD)
        request.answer({}, files.read(_path(request.header), int(max_bytes)))

    def _write(self, request: Request) -> None:
        files.write(_path(request.header), request.payload, self._settings.max_file_bytes)
        request.answer({})


def _number(header: Mapping[str, Any], key: str, most: float) -> float:
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
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise BadRequest("a path is text, with surrogate escapes for bytes that are not UTF-8") from None
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
