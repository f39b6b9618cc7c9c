"""JSON over HTTP to a model server: bounded retries, deadlines, and errors without secrets."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import LineTooLong

from rollouts.llm.errors import ModelError

MAX_ATTEMPTS = 4
FIRST_BACKOFF = 0.25  # seconds; doubles, with full jitter
CONNECT_TIMEOUT = 10.0  # seconds
TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
MESSAGE_LIMIT = 500  # characters of a server's own words kept in an error

# Of one event: the first one of vLLM's repeats the ids of the whole prompt.
LONGEST_EVENT = 64 * 1024 * 1024  # bytes

# vLLM's front end closes idle connections after 5 s; reusing one at that moment costs a failed request.
KEEPALIVE_SECONDS = 4.0


class Transport:
    """One aiohttp session, made on first use inside the running loop.

    Cancelling a pending `request` closes its connection at once, which is what makes vLLM abort the generation.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def request(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, api_key: str = "", timeout: float
    ) -> dict[str, Any]:
        """Send and return the JSON object of a 200 answer. `timeout` (seconds) spans all attempts.

        Connect errors and 429/502/503/504 are tried again; a request whose answer was read never is. Raises `ModelError`.
        """
        return _json_object(await self.command(method, url, body, api_key=api_key, timeout=timeout), url)

    async def command(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, api_key: str = "", timeout: float
    ) -> bytes:
        """The same for a request whose 200 answer need not be JSON."""
        payload = None if body is None else _payload(body)
        try:
            async with asyncio.timeout(timeout) as deadline:
                async with await self._accepted(method, url, payload, api_key, deadline) as response:
                    return await _read(response, url)
        except TimeoutError as exc:
            raise ModelError(f"{url} did not answer within {timeout:g} s", retryable=True) from exc
        except ModelError as exc:
            exc.args = (_redact(str(exc), api_key),)
            raise

    async def stream(
        self,
        url: str,
        body: Mapping[str, Any],
        each: Callable[[dict[str, Any]], Awaitable[None]],
        *,
        api_key: str = "",
        timeout: float,
    ) -> None:
        """Post, and give the JSON object of every server-sent event of the answer to `each` as it comes, until `[DONE]`.

        As `request` until the answer begins; what breaks off afterwards is not tried again. `timeout` spans `each` too.
        """
        try:
            async with asyncio.timeout(timeout) as deadline:
                async with await self._accepted("POST", url, _payload(body), api_key, deadline) as response:
                    async for event in _events(response, url):
                        await each(event)
        except TimeoutError as exc:
            raise ModelError(f"{url} did not finish its answer within {timeout:g} s", retryable=True) from exc
        except ModelError as exc:
            exc.args = (_redact(str(exc), api_key),)
            raise

    async def close(self) -> None:
        """Close the session and its connections, for good: a call that is still being tried again fails. Idempotent."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _accepted(
        self, method: str, url: str, payload: bytes | None, api_key: str, deadline: asyncio.Timeout
    ) -> aiohttp.ClientResponse:
        """A response of status 200, whose body has not been read."""
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return await self._once(method, url, payload, headers)
            except _TryAgain as failure:
                pause = max(failure.not_before, random.uniform(0, FIRST_BACKOFF * 2 ** (attempt - 1)))  # noqa: S311
                left = (deadline.when() or 0.0) - asyncio.get_running_loop().time()
                if attempt == MAX_ATTEMPTS or pause >= left:
                    raise ModelError(str(failure), retryable=True, status=failure.status) from failure
                await asyncio.sleep(pause)
        raise AssertionError("the loop above returns or raises")

    async def _once(self, method: str, url: str, payload: bytes | None, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            response = await self._open().request(method, url, data=payload, headers=headers, allow_redirects=False)
        except aiohttp.InvalidURL as exc:
            raise ModelError(f"{url!r} is not a URL", retryable=False) from exc
        except aiohttp.ClientConnectionError as exc:
            raise _TryAgain(f"{url} is unreachable: {why_unreachable(exc)}") from exc
        except aiohttp.ClientError as exc:
            raise ModelError(f"{url} does not speak HTTP: {exc}", retryable=True) from exc
        if response.status == 200:
            return response
        async with response:
            raw = await _read(response, url)
        if response.status in TRANSIENT_STATUSES:
            raise _TryAgain(_refusal(url, response.status, raw), response.status, _retry_after(response))
        raise ModelError(_refusal(url, response.status, raw), retryable=response.status >= 500, status=response.status)

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:  # else it would make a session that nobody closes
            raise ModelError("this process makes no more calls: its client is closed", retryable=True)  # by another process
        if self._session is None:
            # Admission is the scheduler's: a worker process may have a thousand calls in flight.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
            self._session = aiohttp.ClientSession(connector=connector, timeout=limits)
        return self._session


class _TryAgain(Exception):
    """This attempt failed before its answer was accepted, in a way that may pass."""

    def __init__(self, message: str, status: int | None = None, not_before: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.not_before = not_before


def why_unreachable(error: Exception) -> str:
    """In the system's words where it has a number for it; aiohttp's name its internals."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number and number > 0 else str(error) or type(error).__name__


def _payload(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)  # prompts are long lists of ids: a tenth of the time of `json`
    except TypeError:  # half of a surrogate pair, or an integer of more than 64 bits
        return json.dumps(body, separators=(",", ":")).encode()


async def _read(response: aiohttp.ClientResponse, url: str) -> bytes:
    try:
        return await response.read()
    except aiohttp.ClientError as exc:
        raise ModelError(f"{url} broke off its answer: {exc}", retryable=True, status=response.status) from exc


async def _events(response: aiohttp.ClientResponse, url: str) -> AsyncIterator[dict[str, Any]]:
    """The data of each event. Raises `ModelError` when the stream ends before its end, or carries an error."""
    try:
        while line := await response.content.readuntil(b"\n", max_size=LONGEST_EVENT):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = _json_object(data, url)
            if "error" in event:
                raise ModelError(_refusal(url, response.status, data), retryable=True, status=response.status)
            yield event
    except (aiohttp.ClientError, LineTooLong) as exc:
        raise ModelError(f"{url} broke off its answer: {exc}", retryable=True, status=response.status) from exc
    raise ModelError(f"{url} ended its answer before the end", retryable=True, status=response.status)


def _parsed(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except ValueError:  # also NaN, which servers do write, and whose place is to be told
        return json.loads(raw)


def _json_object(raw: bytes, url: str) -> dict[str, Any]:
    try:
        answer = _parsed(raw)
    except ValueError as exc:
        raise ModelError(f"{url} answered with something that is not JSON", retryable=True, status=200) from exc
    if not isinstance(answer, dict):
        raise ModelError(f"{url} answered with JSON that is not an object", retryable=True, status=200)
    return answer


def _retry_after(response: aiohttp.ClientResponse) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0


def _refusal(url: str, status: int, raw: bytes) -> str:
    """A sentence with the server's own message, wherever its dialect puts it."""
    text = raw.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        message = error.get("message") if isinstance(error, dict) else error
        text = str(message or text)
    return f"{url} answered {status}: {text[:MESSAGE_LIMIT]}"


def _redact(message: str, api_key: str) -> str:
    return message.replace(api_key, "[api key]") if api_key else message
