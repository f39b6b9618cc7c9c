"""The persistent Python behind the `python` verb: the broker's side. Its other side is `worker`."""

from __future__ import annotations

import os
import signal
import socket
import sys

from .descriptors import CELL_CHANNEL, CELL_SOURCE
from .framing import FrameError, FrameReader, encode
from .processes import send, spawn
from .tool import Settings, Tool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .loop import Loop
    from .processes import Moment

_MAX_REPORT = 64 * 1024


class Interpreter(Tool):
    """Cells are executed in one Python process; it can crash, hang or be killed without harm to the broker."""

    grace = 1.0

    def __init__(self, loop: Loop, settings: Settings, tools: Sequence[Tool]) -> None:
        super().__init__(loop, settings, tools)
        self._channel: socket.socket | None = None
        self._source = -1
        self._frames = FrameReader()

    def _start_child(self, output: int) -> int:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._source = os.memfd_create("cell")
        self._frames = FrameReader(_MAX_REPORT + 16 * self._settings.output_bytes)  # two texts, escaped
        null = os.open(os.devnull, os.O_RDONLY)
        pid = spawn(
            (sys.executable, sys.argv[0], "worker", str(self._settings.output_bytes)),
            env=self._settings.env,
            cwd=self.cwd,
            descriptors={0: null, 1: output, 2: output, CELL_CHANNEL: theirs.fileno(), CELL_SOURCE: self._source},
            limits=self._settings.rlimits,
            ignores_interrupt=True,  # until it runs a cell
        )
        os.close(null)
        theirs.close()
        self._loop.watch(self._channel.fileno(), self._on_report)
        return pid

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

    def _result(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        if "exit_code" not in outcome:
            return {"value": outcome.get("value"), "error": outcome.get("error")}
        code = outcome["exit_code"]
        how = f"was killed by {signal.Signals(code - 128).name}" if code > 128 else f"exited with code {code}"
        return {"value": None, "error": f"The interpreter {how}; all its state is lost. The next cell runs in a new one."}

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
            for header, _ in self._frames.feed(data):
                self._finish(header, restarted=False)
        except FrameError:
            self._kill_child()  # the cell's code took hold of the channel
