"""Judging mathematical answers in processes that can be killed.

A `MathVerifier` owns a few threads; each thread owns one persistent `rollouts.rewards.math_server` process, started at its
first use and replaced after a failure. Threads rather than an event loop own them, so that one verifier serves every loop of a
process as well as code that has none (the check of tasks at import).
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict, cast

from rollouts.engine.errors import EvaluationFailed
from rollouts.rewards.process import JsonLineProcess, ProcessGone

# Ten times the longest gold answer of the usual competition sets; what SymPy needs grows much faster than the length.
MAX_EXPRESSION_CHARS = 2000

_GRACE_SECONDS = 1.0  # the process kills itself at its timeout; this long after it we do


class Verdict(TypedDict):
    """`rollouts.rewards.math.MathVerdict` as it comes over the pipe."""

    correct: bool
    parsed_gold: str
    parsed_answer: str


class MathVerifier:
    """Judges answers in up to `processes` processes. One per process of ours is enough: see `shared_verifier`."""

    def __init__(self, *, processes: int = 2, timeout: float = 20.0) -> None:
        """`timeout` is in seconds, for one comparison; the wait for a free process does not count."""
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="math-verifier")
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._processes: list[JsonLineProcess] = []

    async def verify(self, gold: str, answer: str) -> Verdict:
        """Compare an answer with the gold one.

        An answer longer than `MAX_EXPRESSION_CHARS` is wrong. Raises `EvaluationFailed` when the two could not be compared.
        """
        if len(answer) > MAX_EXPRESSION_CHARS:
            return Verdict(correct=False, parsed_gold="", parsed_answer="")
        reply = await asyncio.wrap_future(self._threads.submit(self._ask, {"gold": gold, "answer": answer}))
        if "verdict" not in reply:
            raise EvaluationFailed(f"math-verify could not compare: {reply.get('unparseable') or reply['error']}")
        return cast(Verdict, reply["verdict"])

    def check_gold(self, gold: str) -> None:
        """Raise ValueError when no answer could ever be compared with this gold one. Blocks."""
        if len(gold) > MAX_EXPRESSION_CHARS:
            raise ValueError(f"longer than {MAX_EXPRESSION_CHARS} characters")
        try:
            reply = self._threads.submit(self._ask, {"gold": gold}).result()
        except EvaluationFailed as exc:
            raise ValueError(str(exc)) from exc
        if "verdict" not in reply:
            raise ValueError(reply.get("unparseable") or f"math-verify raised {reply['error']}")

    def close(self) -> None:
        """End the threads and their processes. Comparisons under way finish first, those waiting do not start."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.stop()
        self._processes.clear()

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        """One request to the process of this thread."""
        try:
            return self._process().ask(request | {"timeout": self._timeout}, timeout=self._timeout + _GRACE_SECONDS)
        except ProcessGone as exc:
            raise EvaluationFailed(f"the math-verify process {exc}", retryable=True) from exc

    def _process(self) -> JsonLineProcess:
        process: JsonLineProcess | None = getattr(self._mine, "process", None)
        if process is None or not process.alive:
            replaced, process = process, JsonLineProcess("rollouts.rewards.math_server")
            self._mine.process = process
            with self._lock:
                self._processes = [p for p in self._processes if p is not replaced] + [process]
            if replaced is not None:
                replaced.stop()
        return process


@functools.cache
def shared_verifier() -> MathVerifier:
    """The verifier of this process, closed at its exit."""
    verifier = MathVerifier()
    atexit.register(verifier.close)
    return verifier
