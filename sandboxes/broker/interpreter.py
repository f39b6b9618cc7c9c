"""The persistent Python behind the `python` verbs: the broker's side. Its other side is `worker`."""

from __future__ import annotations

import os
import sys

from .descriptors import CELL_CHANNEL, CELL_SOURCE
from .framing import FrameError, FrameReader, encode
from .lean import signal, socket
from .output import OutputPipe
from .pictures import MAX_PICTURES, MAX_TOTAL_BYTES, MIME_TYPES
from .processes import send, spawn
from .tool import Settings, Tool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from .loop import Loop
    from .processes import Moment

_MAX_REPORT_BASE = 256 * 1024
_ENV = {"MPLBACKEND": "Agg"}  # there is no display
_WORKER = "import sys; sys.path[0] = sys.argv[1]; from broker.worker import main; main(int(sys.argv[2]))"
# Gives way to the command in its further arguments where the agent's Python is too old or has not all of its library.
_WORKER_OR_ELSE = f"""
import os, sys
try:
    if sys.version_info < (3, 9):
        raise ImportError
    sys.path[0] = sys.argv[1]
    import broker.worker
except (ImportError, SyntaxError):
    os.execv(sys.argv[3], sys.argv[3:])
{_WORKER}
"""


class Interpreter(Tool):
    """Cells are executed in one Python process; it can crash, hang or be killed without harm to the broker."""

    grace = 1.0

    def __init__(self, loop: Loop, settings: Settings, tools: Sequence[Tool]) -> None:
        super().__init__(loop, settings, tools)
        self._channel: socket.socket | None = None
        self._source = -1
        self._frames = FrameReader()
        self._restarts: list[Callable[[], None]] = []

    def interrupt(self) -> None:
        """Deliver KeyboardInterrupt to the running cell, if any."""
        if self._job is not None and self.pid is not None:
            send(self.pid, signal.SIGINT)

    def restart(self, when_done: Callable[[], None]) -> None:
        """End the process with the cell it may run; cells that wait get a new one."""
        if self.pid is None:
            when_done()
        else:
            self._restarts.append(when_done)
            self._kill_child()

    def _open_output(self) -> OutputPipe:
        return OutputPipe(self._loop, self._on_output)

    def _start_child(self, output: int) -> int:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._source = os.memfd_create("cell")
        self._frames = FrameReader(_MAX_REPORT_BASE + 8 * self._settings.output_bytes + MAX_TOTAL_BYTES)  # two texts
        null = os.open(os.devnull, os.O_RDONLY)
        pid = spawn(
            self._command(),
            env={**_ENV, **self._settings.env},
            cwd=self.cwd,
            descriptors={0: null, 1: output, 2: output, CELL_CHANNEL: theirs.fileno(), CELL_SOURCE: self._source},
            limits=self._settings.rlimits,
            ignores_interrupt=True,  # until it runs a cell
        )
        os.close(null)
        theirs.close()
        self._loop.watch(self._channel.fileno(), self._on_report)
        return pid

    def _command(self) -> list[str]:
        own, lent = self._settings.command("python3"), self._settings.lent("python3")
        arguments = [sys.path[0], str(self._settings.output_bytes)]
        simply = ["-c", _WORKER, *arguments]
        return [*own, *simply] if lent in (own, []) else [*own, "-c", _WORKER_OR_ELSE, *arguments, *lent, *simply]

    def _hand_over(self, text: str) -> None:
        if self._channel is not None:
            # Through a file, as a socket would make the broker wait for a worker that does not read.
            os.ftruncate(self._source, 0)
            os.pwrite(self._source, text.encode(), 0)
            self._channel.sendall(encode({"env": self._news}))

    def _send_interrupt(self, pid: int, since: Moment) -> None:
        send(pid, signal.SIGINT)

    def _release(self) -> None:
        if self._channel is not None:
            self._loop.unwatch(self._channel.fileno())
            self._channel.close()
            self._channel = None
            os.close(self._source)

    def _result(self, outcome: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        if "exit_code" not in outcome:
            return dict(outcome["header"]), outcome["payload"]
        code = outcome["exit_code"]
        how = f"was killed by {_name_of(code - 128)}" if code > 128 else f"exited with code {code}"
        error = f"The interpreter {how}; all its state is lost. The next cell runs in a new one.".encode()
        return {"value": None, "error": len(error), "pictures": []}, error

    def _on_exit(self, exit_code: int) -> None:
        super()._on_exit(exit_code)
        restarts, self._restarts = self._restarts, []
        for when_done in restarts:
            when_done()

    def _on_report(self, _events: int) -> None:
        if self._channel is None:
            return
        try:
            data = self._channel.recv(1 << 18)
        except ConnectionError:
            data = b""  # it ended with our request unread
        if not data:
            self._loop.unwatch(self._channel.fileno())
            self._on_channel_closed()
            return
        try:
            for header, payload in self._frames.feed(data):
                _check_report(header, payload)
                self._finish({"header": header, "payload": payload}, restarted=False)
        except FrameError:
            self._kill_child()  # the cell's code took hold of the channel


def _check_report(header: Mapping[str, Any], payload: bytes) -> None:
    """Raises FrameError for what `worker` would not send: it must not reach the host as if it came from us."""
    pictures = header.get("pictures")
    if set(header) != {"value", "error", "pictures"} or type(pictures) is not list or len(pictures) > MAX_PICTURES:
        raise FrameError("not a report")
    sizes = [size for size in (header["value"], header["error"]) if size is not None]
    for picture in pictures:
        if type(picture) is not list or len(picture) != 2 or picture[0] not in MIME_TYPES:
            raise FrameError("not a picture")
        sizes.append(picture[1])
    if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != len(payload):
        raise FrameError("sizes that do not fit")


def _name_of(number: int) -> str:
    from signal import Signals  # slow to import

    return Signals(number).name
