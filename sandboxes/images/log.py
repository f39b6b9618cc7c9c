"""The log of a build: all of it in a file, and its end at hand. No Django."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self


class BuildLog:
    """Implements `sandboxes.images.job.Monitor`; written to by the loop and by threads. `tail` characters are kept at hand."""

    def __init__(self, path: Path, tail: int) -> None:
        self._file = path.open("w", encoding="utf-8", errors="replace", buffering=1)
        self._lock = threading.Lock()
        self._most = tail
        self._begun = time.monotonic()
        self.tail = ""
        self.length = 0  # characters
        self.share = 0.0
        self.step = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def line(self, text: str) -> None:
        """One or more lines, with the seconds since the beginning."""
        text = text.replace("\0", "").encode(errors="replace").decode()
        stamped = "".join(f"{time.monotonic() - self._begun:7.1f}  {line}\n" for line in text.splitlines())
        with self._lock:
            self._file.write(stamped)
            self.tail = (self.tail + stamped)[-self._most :]
            self.length += len(stamped)

    def progress(self, share: float, step: str) -> None:
        self.share, self.step = share, step[:200]
