"""A scripted model server that is killed, started again under its address, and frozen."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx

from prorl_site.embedded.processes import http_answers, wait_until
from tests.services.ports import lasting_port

_START_SECONDS = 30.0


class Model:
    """Answers every call after `delay` seconds."""

    def __init__(self, *, delay: float) -> None:
        self._port = lasting_port()
        self._delay = delay
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        options = ["--die-with-parent", "--port", str(self._port), "--delay", str(self._delay)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollouts.llm.scripted", *options], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert wait_until(lambda: http_answers(f"{self.url}/health"), timeout=_START_SECONDS), "the model did not start"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def answer_after(self, seconds: float | None) -> None:
        """Change the delay of replies to come; None for the usual one."""
        httpx.post(f"{self.url}/control", json={"delay": seconds}).raise_for_status()

    def freeze(self) -> None:
        """It accepts connections and answers none."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)
