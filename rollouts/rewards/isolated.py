"""Judging mathematical answers in processes that can be killed.

A `MathVerifier` owns a few threads; each thread owns one persistent `rollouts.rewards.math_server` process, started at its
first use and replaced after a failure. Threads rather than an event loop own them, so that one verifier serves every loop of a
process as well as code that has none (the check of tasks at import).
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import queue
import threading
from concurrent.futures import Future
from typing import Any, TypedDict, cast

from rollouts.engine.errors import EvaluationFailed
from rollouts.rewards.process import JsonLineProcess, ProcessGone

# Ten times the longest gold answer of the usual competition sets; what SymPy needs grows much faster than the length.
MAX_EXPRESSION_CHARS = 2000

_GRACE_SECONDS = 1.0  # the process kills itself at its timeout; this long after it we do


_Request = dict[str, str]
_Reply = dict[str, Any]


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
        self._requests: queue.SimpleQueue[tuple[_Request, Future[_Reply]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._processes: dict[int, JsonLineProcess] = {}  # by thread
        # Daemons, because the interpreter waits for other threads before it lets `close` end a long comparison.
        self._threads = [threading.Thread(target=self._serve, name=f"math-verifier-{n}", daemon=True) for n in range(processes)]
        for thread in self._threads:
            thread.start()

    async def verify(self, gold: str, answer: str) -> Verdict:
        """Compare an answer with the gold one.

        An answer longer than `MAX_EXPRESSION_CHARS` is wrong. Raises `EvaluationFailed` when the two could not be compared.
        """
        if len(answer) > MAX_EXPRESSION_CHARS:
            return Verdict(correct=False, parsed_gold="", parsed_answer="")
        reply = await asyncio.wrap_future(self._submit({"gold": gold, "answer": answer}))
        if "verdict" not in reply:
            raise EvaluationFailed(f"math-verify could not compare: {reply.get('unparseable') or reply['error']}")
        return cast(Verdict, reply["verdict"])

    def check_gold(self, gold: str) -> None:
        """Raise ValueError when no answer could ever be compared with this gold one. Blocks."""
        if len(gold) > MAX_EXPRESSION_CHARS:
            raise ValueError(f"longer than {MAX_EXPRESSION_CHARS} characters")
        try:
            reply = self._submit({"gold": gold}).result()
        except EvaluationFailed as exc:
            raise ValueError(str(exc)) from exc
        if "verdict" not in reply:
            raise ValueError(reply.get("unparseable") or f"math-verify raised {reply['error']}")

    def close(self) -> None:
        """End the threads and their processes. Comparisons under way or waiting fail."""
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _submit(self, request: _Request) -> Future[_Reply]:
        future: Future[_Reply] = Future()
        self._requests.put((request, future))
        return future

    def _serve(self) -> None:
        """One thread: answers requests with a process of its own, one after the other."""
        process: JsonLineProcess | None = None
        while (item := self._requests.get()) is not None:
            request, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if process is not None and not process.alive:
                    process.stop()
                    process = None
                process = process or self._start()
                reply = process.ask(request | {"timeout": self._timeout}, timeout=self._timeout + _GRACE_SECONDS)
            except ProcessGone as exc:
                failure = EvaluationFailed(f"the math-verify process {exc}", retryable=True)
                failure.__cause__ = exc
                future.set_exception(failure)
            else:
                future.set_result(reply)
        if process is not None:
            process.stop()

    def _start(self) -> JsonLineProcess:
        with self._lock:
            if self._closed:
                raise ProcessGone("is not wanted any more")
            process = self._processes[threading.get_ident()] = JsonLineProcess("rollouts.rewards.math_server")
        return process


@functools.cache
def shared_verifier() -> MathVerifier:
    """The verifier of this process, closed at its exit."""
    verifier = MathVerifier()
    atexit.register(verifier.close)
    return verifier
