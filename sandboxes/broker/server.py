"""Serves connections: reads requests, runs them, writes answers."""

from __future__ import annotations

import os
import socket

from . import files
from .framing import MAX_FRAME, MAX_PAYLOAD, FrameError, FrameReader, encode
from .interpreter import Interpreter
from .loop import READ, WRITE, Loop
from .shell import Shell
from .tool import Job, Settings, Tool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .loop import Timer

_MAX_UNSENT = 2 * MAX_FRAME
_MAX_TIMEOUT = 7 * 24 * 3600.0
_MAX_ENV_BYTES = 4096  # far below what a pipe takes without a reader


class BadRequest(Exception):
    """A well-formed frame that asks for something impossible."""


class Server:
    """Accepts connections on a listening socket, and stops the loop when no host has been connected for too long."""

    def __init__(self, loop: Loop, listener: socket.socket, settings: Settings, dead_man: float) -> None:
        self.loop = loop
        self.tools: dict[str, Tool] = {}
        siblings: list[Tool] = []
        self.tools["bash"] = Shell(loop, settings, siblings)
        self.tools["python"] = Interpreter(loop, settings, siblings)
        siblings.extend(self.tools.values())
        self.max_file_bytes = settings.max_file_bytes
        self._env = settings.env
        self._listener = listener
        self._dead_man = dead_man
        self._connections: set[Connection] = set()
        self._timer: Timer | None = None
        listener.setblocking(False)
        loop.watch(listener.fileno(), self._on_connection)
        self._arm_dead_man()

    def set_env(self, variables: dict[str, str]) -> None:
        """For every command and cell from now on."""
        self._env.update(variables)
        for tool in self.tools.values():
            tool.note_env(variables)

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._arm_dead_man()

    def _arm_dead_man(self) -> None:
        self._timer = self.loop.call_later(self._dead_man, self.loop.stop)

    def _on_connection(self, _events: int) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # the peer is already gone
        if self._timer is not None:
            self._timer.cancel()
        self._connections.add(Connection(self, peer))


class Connection:
    """One host process. What it asked for and is still running when it goes away is ended, as if cancelled."""

    def __init__(self, server: Server, peer: socket.socket) -> None:
        self._server = server
        self._peer = peer
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._pending: dict[int, tuple[Tool, Job]] = {}
        self._open = True
        peer.setblocking(False)
        server.loop.watch(peer.fileno(), self._on_ready)

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & ~WRITE and self._open:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._peer.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        try:
            for header, payload in self._frames.feed(data):
                self._on_request(header, payload)
        except FrameError:
            self._close()

    def _on_request(self, header: dict[str, Any], payload: bytes) -> None:
        number, verb = header.get("id"), header.get("verb")
        if type(number) is not int:
            raise FrameError("a request needs an integer id")
        if verb == "cancel":
            if number in self._pending:
                tool, job = self._pending[number]
                tool.cancel(job)
            return
        if number in self._pending:
            raise FrameError(f"id {number} is already in use")
        try:
            if isinstance(verb, str) and verb in self._server.tools:
                self._run(number, self._server.tools[verb], header, payload)
            else:
                answer, data = self._serve_at_once(verb, header, payload)
                self._answer(number, answer, data)
        except BadRequest as error:
            self._answer(number, {"failure": {"kind": "invalid", "message": str(error)}}, b"")
        except files.FileFailure as error:
            self._answer(number, {"failure": {"kind": "file", "reason": error.reason, "message": str(error)}}, b"")

    def _serve_at_once(self, verb: object, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if verb == "ping":
            return {}, b""
        if verb == "read":
            max_bytes = _number(header, "max_bytes", MAX_PAYLOAD)
            return {}, files.read(_path(header), int(max_bytes))
        if verb == "write":
            files.write(_path(header), payload, self._server.max_file_bytes)
            return {}, b""
        if verb == "env":
            self._server.set_env(_variables(header))
            return {}, b""
        if verb == "list":
            return {"entries": files.list_directory(_path(header))}, b""
        raise BadRequest(f"unknown verb {verb!r}")

    def _run(self, number: int, tool: Tool, header: dict[str, Any], payload: bytes) -> None:
        timeout = _number(header, "timeout", _MAX_TIMEOUT)
        try:
            text = payload.decode("utf-8")
        except UnicodeDecodeError:
            raise BadRequest("the code is not UTF-8") from None
        if "\0" in text:
            raise BadRequest("the code contains a NUL character")

        def answer(result: Mapping[str, Any], output: bytes) -> None:
            del self._pending[number]
            self._answer(number, result, output)

        job = Job(text, timeout, answer)
        self._pending[number] = (tool, job)
        tool.submit(job)

    def _answer(self, number: int, header: Mapping[str, Any], payload: bytes) -> None:
        if not self._open:
            return
        self._unsent += encode({"id": number, **header}, payload)
        if len(self._unsent) > _MAX_UNSENT:
            self._close()  # a peer that asks but never reads
        else:
            self._flush()

    def _flush(self) -> None:
        try:
            sent = self._peer.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close()
            return
        del self._unsent[:sent]
        self._server.loop.watch(self._peer.fileno(), self._on_ready, READ | WRITE if self._unsent else READ)

    def _close(self) -> None:
        self._open = False
        self._server.loop.unwatch(self._peer.fileno())
        self._peer.close()
        for tool, job in list(self._pending.values()):
            tool.cancel(job)
        self._server.forget(self)


def _path(header: dict[str, Any]) -> str:
    path = header.get("path")
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadRequest("a path is a non-empty string without NUL")
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib is slow to import


def _number(header: dict[str, Any], key: str, most: float) -> float:
    value: Any = header.get(key)
    if type(value) not in (int, float) or not 0 < value <= most:
        raise BadRequest(f"{key} is a number above 0 and at most {most:g}")
    return float(value)


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _variables(header: dict[str, Any]) -> dict[str, str]:
    given: Any = header.get("variables")
    variables: dict[str, Any] = given if isinstance(given, dict) else {"": None}
    for name, value in variables.items():
        if not (name.isascii() and name.isidentifier() and isinstance(value, str) and _is_text(value)):
            raise BadRequest("variables map names to texts without NUL")
    if sum(len(name) + len(value.encode()) for name, value in variables.items()) > _MAX_ENV_BYTES:
        raise BadRequest(f"variables take at most {_MAX_ENV_BYTES} bytes together")
    return variables
