"""A trainer that does not know of faults: one thread submits, another one reads results along a cursor, both all the time."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any

from tests.acceptance.faults.site import POLICY, Site

_GROUP = 4
_PAUSE_SECONDS = 0.2

# What the scripted model has its tool run: an output too large for a row, different each time, and what proves it to be whole.
_PROGRAM = """
import hashlib, os
text = os.urandom(700).hex()
print(text, hashlib.sha256(text.encode()).hexdigest(), 12 * {number}, sep="\\n")
"""


def is_whole(output: str) -> bool:
    """Whether the output of the tool is all that was printed."""
    text, digest, *_ = [*output.splitlines(), "", ""]
    return hashlib.sha256(text.encode()).hexdigest() == digest


class Trainer:
    """One run. `submit` returns at once; `close` when everything that was submitted has been delivered, or time is up."""

    def __init__(self, site: Site, name: str, settings: dict[str, Any]) -> None:
        self._site = site
        with site.client() as client:
            self.run_id: str = client.create_run(name, policy=POLICY, settings=settings)["id"]
        self.submitted = 0
        self.delivered: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._complete = threading.Event()
        self._submitting: list[threading.Thread] = []
        self._reading = self._start(self._read)

    def submit(self, rollouts: int) -> None:
        """Half of them sums without a sandbox, half problems whose tool runs in one; a request for each group."""
        groups = [_group(number) for number in range(rollouts // _GROUP)]
        self.submitted += len(groups) * _GROUP
        self._submitting.append(self._start(lambda: self._submit(groups)))

    def close(self, timeout: float) -> bool:
        """Whether everything has been delivered within `timeout` seconds."""
        for thread in self._submitting:
            thread.join(timeout)
        self._complete.set()
        self._reading.join(timeout)
        return not self._reading.is_alive()

    def read_again(self) -> list[str]:
        """The results once more, from the beginning: their ids."""
        with self._site.client() as client:
            return [result["id"] for result in client.iter_results(self.run_id, wait=0)]

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
        thread.start()
        return thread

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the audit tells
            self.errors.append(f"{type(error).__name__}: {error}")

    def _submit(self, groups: list[dict[str, Any]]) -> None:
        with self._site.client() as client:
            for group in groups:
                client.submit_groups(self.run_id, [group])

    def _read(self) -> None:
        after = ""
        with self._site.client() as client:
            while True:
                last = self._complete.is_set()
                for result in client.iter_results(self.run_id, after, include="trajectory", wait=2):
                    self.delivered.append(dict(result))
                    after = result["cursor"]
                if last:
                    return
                self._complete.wait(_PAUSE_SECONDS)  # all that was submitted so far has ended


def _group(number: int) -> dict[str, Any]:
    if number % 2:
        return {"n": _GROUP, "environment": "sums", "payload": {"a": number, "b": 1}}
    call = json.dumps({"name": "python", "arguments": {"code": _PROGRAM.format(number=number)}})
    question = f"What is 12 * {number}? [[reply:<tool_call>\n{call}\n</tool_call>]]"
    problem = {"id": f"p{number}", "question": question, "expected_answer": str(12 * number)}
    return {"n": _GROUP, "environment": "problems", "payload": problem}
