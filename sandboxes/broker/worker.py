"""The persistent Python behind the `python` verb: what runs in the interpreter process.

For each frame `{"env": new variables}` on CELL_CHANNEL it runs the cell in CELL_SOURCE, all in one `__main__` module, and
answers with a frame `{"value": size or null, "error": size or null, "pictures": [[MIME type, size], ...]}`, whose payload has
the bytes of these, one after the other: the value's repr, a traceback, pictures. Output goes to the process's own stdout and
stderr, so that of its child processes is captured as well.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import os
import signal
import socket
import sys
import traceback
import types

from .descriptors import CELL_CHANNEL, CELL_SOURCE
from .framing import FrameReader, encode
from .pictures import Pictures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Cells:
    """Runs cells one after the other in a namespace they share."""

    def __init__(self, text_limit: int) -> None:
        self._text_limit = text_limit
        self._count = 0
        self._interrupt_handler: Any = signal.default_int_handler
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module
        self._pictures = Pictures()
        builtins.display = self._pictures.display  # type: ignore[attr-defined]

    def run(self, source: str) -> bytes:
        """The report. Never raises, whatever the cell does."""
        self._count += 1
        name = f"<cell {self._count}>"
        # Lets tracebacks and `inspect` show the cell's lines.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        value = error = None
        try:
            signal.signal(signal.SIGINT, self._interrupt_handler or signal.default_int_handler)
            try:
                try:
                    value = self._evaluate(source, name)
                finally:
                    self._pictures.show_open_figures()
            finally:
                self._interrupt_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
                sys.stdout.flush()
                sys.stderr.flush()
        except BaseException as raised:
            error = self._describe(raised, name)
        texts = [None if text is None else self._cut(text) for text in (value, error)]
        pictures = self._pictures.take()
        sizes = [None if text is None else len(text) for text in texts]
        header = {"value": sizes[0], "error": sizes[1], "pictures": [(mime, len(data)) for mime, data in pictures]}
        return encode(header, b"".join([text for text in texts if text is not None] + [data for _, data in pictures]))

    def _evaluate(self, source: str, name: str) -> str | None:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._module.__dict__)  # noqa: S102 - running code is the purpose
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._module.__dict__)  # noqa: S307
        if value is not None:
            self._pictures.show(value)
        return None if value is None else repr(value)

    def _describe(self, error: BaseException, name: str) -> str:
        """The traceback as the cell's author knows it: without the frames of this file above it."""
        frames = error.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell "):
            frames = frames.tb_next
        try:
            return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        except BaseException:
            return f"{type(error).__name__} (its traceback could not be formatted)"

    def _cut(self, text: str) -> bytes:
        if len(text) > self._text_limit:
            half = self._text_limit // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"
        return text.encode("utf-8", "backslashreplace")


def main(text_limit: int) -> None:
    """Serve cells until the broker closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (CELL_CHANNEL, CELL_SOURCE):
        os.set_inheritable(fd, False)
    channel = socket.socket(fileno=CELL_CHANNEL)
    sys.argv = [""]
    sys.path[0] = ""
    cells = Cells(text_limit)
    frames = FrameReader()
    own_pid = os.getpid()
    while data := channel.recv(4096):
        for request, _ in frames.feed(data):
            os.environ.update(request["env"])
            source = os.pread(CELL_SOURCE, os.fstat(CELL_SOURCE).st_size, 0).decode()
            report = cells.run(source)
            if os.getpid() != own_pid:
                os._exit(0)  # a fork that ran to the end of its cell: only the original answers
            channel.sendall(report)
