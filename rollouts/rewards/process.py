"""A persistent child process that answers JSON lines, with a deadline for each answer."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from typing import Any, cast

_START_SECONDS = 60.0  # SymPy takes a second to import, much longer on a cold network file system
_MAX_REPLY_BYTES = 64 * 1024


class ProcessGone(Exception):
    """The process died, or was killed for being late or speaking nonsense. The message says which."""


class JsonLineProcess:
    """`python -m <module>`: says one line when it is ready, then answers one line for each line.

    Used by one thread at a time. It does not survive a failed request: make a new one when `alive` is false.
    """

    def __init__(self, module: str) -> None:
        """Start it without waiting for it. Raises `ProcessGone` when this host cannot start another process."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"LANG": "C.UTF-8"},  # none of our settings, some of which are secrets
                start_new_session=True,  # a Ctrl-C in our terminal is not for it
            )
        except OSError as exc:
            raise ProcessGone(f"cannot be started: {exc}") from exc
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """Send a request and return its answer. `timeout` is in seconds and does not span the start. Raises `ProcessGone`."""
        try:
            if not self._ready:
                self._read_line(_START_SECONDS)
                self._ready = True
            stdin = self._process.stdin
            assert stdin is not None  # noqa: S101 - asked for above
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            return cast(dict[str, Any], json.loads(self._read_line(timeout)))
        except ProcessGone:
            self.stop()
            raise
        except (OSError, ValueError) as exc:
            self.stop()
            raise ProcessGone(f"failed: {exc}") from exc

    def kill(self) -> None:
        """Kill the process; a request under way fails at once. Any thread may do this."""
        self._process.kill()

    def stop(self) -> None:
        """Kill the process and reap it. Idempotent."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not yet written has no reader any more
                    pipe.close()
        self._process.wait()

    def _read_line(self, timeout: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 - asked for above
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not poll.poll(remaining * 1000):
                raise ProcessGone(f"gave no answer within {timeout:g} s")
            chunk = stdout.read1(4096)  # type: ignore[attr-defined]  # a BufferedReader, typed as IO
            if not chunk:
                raise ProcessGone(f"died ({_how(self._process.wait())})")
            line += chunk
            if len(line) > _MAX_REPLY_BYTES:
                raise ProcessGone("answered without end")
        return line


def _how(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
