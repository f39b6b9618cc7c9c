"""The HTTP proxy of network mode `allow_list`: serves a forwarded port, and connects to what the list allows. No Django."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple

from sandboxes.network.dial import Dial, dial
from sandboxes.network.http_head import BadHead, Head, read_head
from sandboxes.network.policy import Refused, Rule, parse_rule
from sandboxes.network.relay import join

_MAX_CONNECTIONS = 48  # at once; a forwarded port has a few more
_HEAD_TIMEOUT = 30.0
_DIAL_TIMEOUT = 30.0
_IDLE_TIMEOUT = 600.0
_LONGEST_PHRASE = 500
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Refusal(NamedTuple):
    """What a sandbox was refused. `number` counts the refusals of a session from 1 on."""

    destination: str  # host:port
    reason: str
    number: int


class AllowListProxy:
    """A `Serve` for the entries of one allow-list; `on_refusal` is told of everything it refuses.

    Tunnels (CONNECT) are open to any protocol. Plain HTTP requests get a connection of their own each. Raises ValueError for an
    entry that `validate_allow` does not accept.
    """

    def __init__(self, allow: Sequence[str], *, on_refusal: Callable[[Refusal], None], dial: Dial = dial) -> None:
        self._allow = ", ".join(allow) or "nothing"
        self._rules = [parse_rule(entry) for entry in allow]
        self._on_refusal = on_refusal
        self._dial = dial
        self._refusals = 0
        self._connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > _MAX_CONNECTIONS:
                _answer(writer, 503, f"more than {_MAX_CONNECTIONS} connections at once")
            else:
                await self._serve(reader, writer)
        finally:
            self._connections -= 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT):
                head = await read_head(reader)
        except BadHead as error:
            _answer(writer, error.status, str(error))
            return
        except TimeoutError:
            _answer(writer, 408, "no request came")
            return
        if head is None:
            return
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT):
                upstream = await self._dial(self._rule(head), head)
        except Refused as refused:
            self._refusals += 1
            self._on_refusal(Refusal(head.authority, str(refused), self._refusals))
            # Most programs show no more than the status line, so that is where the reason has to stand.
            phrase = f"Refused by the network policy of this sandbox: {refused}"
            _answer(writer, 403, f"The network policy of this sandbox refuses {head.authority}: {refused}.", phrase)
            return
        except TimeoutError:
            _answer(writer, 504, f"{head.authority} did not answer in time")
            return
        except OSError as error:
            _answer(writer, 502, f"{head.authority} cannot be reached: {error.strerror or error}")
            return
        if head.tunnel:
            writer.write(_ESTABLISHED)
        else:
            to_proxy = upstream.proxy_headers is not None
            upstream.writer.write(head.request(to_proxy=to_proxy, extra=upstream.proxy_headers or ()))
        upstream.writer.write(head.rest)
        try:
            await join(reader, writer, upstream.reader, upstream.writer, idle_timeout=_IDLE_TIMEOUT)
        except OSError:  # of either side, which the other one learns by a reset
            writer.transport.abort()

    def _rule(self, head: Head) -> Rule:
        for rule in self._rules:
            if rule.allows(head.host, head.port):
                return rule
        raise Refused(f"it allows {self._allow}")


def _answer(writer: asyncio.StreamWriter, status: int, message: str, phrase: str = "") -> None:
    body = f"{message}\n".encode()
    phrase = phrase[:_LONGEST_PHRASE] or HTTPStatus(status).phrase
    writer.write(
        b"HTTP/1.1 %d %b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
        % (status, phrase.encode("ascii", "replace"), len(body), body)
    )
