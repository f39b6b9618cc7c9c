"""When to send a request again, and how long to wait before."""

from __future__ import annotations

import random
import time
from email.utils import parsedate_to_datetime

import httpx

_FIRST_PAUSE = 0.25  # seconds; doubles with every failure
_LONGEST_PAUSE = 10.0
_REPEATED = frozenset({429, 500, 502, 503, 504})


class Retries:
    """The failures of one call. Gives up when the next attempt would start over `patience` seconds after the first failure."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._failures = 0
        self._first_failure = 0.0

    def pause_after_error(self, error: httpx.TransportError) -> float:
        """Seconds to wait after a broken connection. Raises `error` itself when it is time to give up."""
        pause = self._pause(0.0)
        if pause is None:
            raise error
        return pause

    def pause_after(self, response: httpx.Response) -> float | None:
        """Seconds to wait after an answer that may be another one next time; None when it is final."""
        repeated = response.status_code in _REPEATED or _is_still_working(response)
        return self._pause(_retry_after(response)) if repeated else None

    def _pause(self, at_least: float) -> float | None:
        now = time.monotonic()
        if self._failures == 0:
            self._first_failure = now
        longest = min(_FIRST_PAUSE * 2**self._failures, _LONGEST_PAUSE)
        self._failures += 1
        # Jitter, so that a thousand trainers do not come back in step after a restart.
        pause = at_least + random.uniform(longest / 2, longest)  # noqa: S311
        return pause if now + pause - self._first_failure <= self._patience else None


def _is_still_working(response: httpx.Response) -> bool:
    """The answer to an earlier attempt got lost, and the server is not through with it."""
    return response.status_code == 409 and "idempotency_in_progress" in response.text


def _retry_after(response: httpx.Response) -> float:
    """The header in seconds; 0 when it is absent or makes no sense."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
