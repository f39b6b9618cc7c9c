"""Services that parallel test processes share.

The first process of the run starts each of them when somebody first asks, and ends them all. Asking and answering goes through
files in the run's shared directory, since only that is common to the processes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from prorl_site.embedded.processes import wait_until

_WATCH_SECONDS = 0.1
_PATIENCE_SECONDS = 1200.0  # installing vLLM on a fresh machine takes some minutes


class Started(NamedTuple):
    """A running service."""

    url: str
    stop: Callable[[], None]


class Unavailable(Exception):
    """The service cannot run here; the message is the reason of the skip."""


def _vllm(folder: Path) -> Started:
    from prorl_site.embedded.vllm import VllmUnavailable
    from tests.services.vllm import start_tiny_vllm

    try:
        server = start_tiny_vllm()
    except VllmUnavailable as error:
        raise Unavailable(f"vLLM: {error}") from error
    return Started(server.url, server.stop)


_STARTERS = {"vllm": _vllm}


class Lender:
    """Lives in the first process of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closing = threading.Event()
        self._started: list[Started] = []
        self._threads = [threading.Thread(target=self._watch, args=(name,), daemon=True) for name in _STARTERS]
        for thread in self._threads:
            thread.start()

    def _watch(self, name: str) -> None:
        while not self._closing.wait(_WATCH_SECONDS):
            if (self._folder / f"{name}.wanted").exists():
                self._answer(name)
                return

    def _answer(self, name: str) -> None:
        try:
            started = _STARTERS[name](self._folder)
            self._started.append(started)
            answer = {"url": started.url}
        except Unavailable as reason:
            answer = {"unavailable": str(reason)}
        except Exception as error:  # told to whoever asked: it is their test that fails
            answer = {"failed": f"{type(error).__name__}: {error}"}
        partial = self._folder / f"{name}.partial"
        partial.write_text(json.dumps(answer))
        partial.rename(self._folder / f"{name}.answer")

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=5)
        for started in self._started:
            started.stop()


def borrow(name: str, folder: Path) -> str:
    """The URL of a shared service, started if need be; skips the test where it cannot run."""
    (folder / f"{name}.wanted").touch()
    answer_file = folder / f"{name}.answer"
    assert wait_until(answer_file.exists, timeout=_PATIENCE_SECONDS, interval=0.1), f"{name} did not start"
    answer: dict[str, str] = json.loads(answer_file.read_text())
    if "unavailable" in answer:
        pytest.skip(answer["unavailable"])
    assert "url" in answer, answer
    return answer["url"]
