"""Starting programs so that they never outlive us, and small waits and probes around them."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

LEASH = Path(__file__).with_name("leash.py")


class LeashedProcess:
    """A running program with everything it starts. It dies with this process, even if that is killed with SIGKILL.

    It runs in its own session, so a Ctrl-C in the terminal does not reach it: its owner decides when it stops.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Starts `command`, appending its output to `log`. `env` is added to our own environment."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        reading_end, self._lifeline = os.pipe()
        try:
            with log.open("ab") as output:
                self._log_begins = output.tell()
                self._leash = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(LEASH), str(reading_end), *map(str, command)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    cwd=cwd,
                    pass_fds=[reading_end],
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reading_end)

    @property
    def pid(self) -> int:
        """Process id of the leash; it is also the process group of the program."""
        return self._leash.pid

    def poll(self) -> int | None:
        """Exit status, 128 + n when signal n ended it, None while it runs."""
        return self._leash.poll()

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within `timeout` seconds."""
        try:
            self._leash.wait(max(timeout, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """Sends `number` to the program. SIGKILL goes to all it has started."""
        if number is signal.SIGKILL:
            self.kill()
        elif self._leash.poll() is None:
            self._leash.send_signal(number)

    def cut_lifeline(self) -> None:
        """Has the program and all it has started killed, without waiting for it (safe in a signal handler)."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)

    def kill(self) -> None:
        """Kills the program and all it has started, and returns when they are gone."""
        self.cut_lifeline()
        self._leash.wait()

    def log_tail(self, lines: int = 15) -> str:
        """The last lines it wrote, for error messages; not those of whoever wrote to the same log before it."""
        written = self.log.read_bytes()[self._log_begins :]
        return "\n".join(written.decode(errors="replace").splitlines()[-lines:])


def wait_until(condition: Callable[[], bool], *, timeout: float, interval: float = 0.02) -> bool:
    """Whether `condition` came true within `timeout` seconds; asks at once and then every `interval` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_answers(port: int) -> bool:
    """Whether something accepts connections on 127.0.0.1:`port`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def http_answers(url: str) -> bool:
    """Whether a GET of `url` (plain http) gives a 2xx. Ignores proxy settings: it is for servers on this machine."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=2)
    try:
        connection.request("GET", parts.path or "/")
        return 200 <= connection.getresponse().status < 300
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
