"""One signed POST to a receiver that may be slow, hostile, or somewhere it must not be."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from standardwebhooks import Webhook

TIMEOUT_SECONDS = 15.0
_KEPT_CHARS = 1000  # of an answer's body
_IP = ipaddress.IPv4Address | ipaddress.IPv6Address

# Where clouds hand out credentials to whoever asks from inside. The others of them are link-local.
_METADATA = {ipaddress.ip_address(text) for text in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254")}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Answer(NamedTuple):
    """What came of one POST. `status` is None when no answer came; `seconds` is how long it took."""

    status: int | None
    error: str
    body: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class ForbiddenAddress(OSError):
    """The host is, or resolves to, an address that webhooks are not sent to."""


def refusal_of(host: str, *, allow_private: bool) -> str:
    """Why nothing is sent to this address; empty when it may be. A name is judged by what it resolves to, when it is used."""
    try:
        address = _embedded(ipaddress.ip_address(host))
    except ValueError:
        return ""
    if address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified:
        return f"Webhooks are not sent to {host}: link-local, metadata and multicast addresses are refused."
    if not allow_private and not address.is_global:
        return f"Webhooks are not sent to {host}: this site sends to public addresses only (PRORL_WEBHOOK_ALLOW_PRIVATE)."
    return ""


def _embedded(address: _IP) -> _IP:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(address.packed[-4:])
        return address.ipv4_mapped or address.sixtofour or address
    return address


class _GuardedResolver(AbstractResolver):
    """Judges the very addresses that are connected to, so that a name cannot change its mind in between."""

    def __init__(self, *, allow_private: bool) -> None:
        self._resolver = aiohttp.ThreadedResolver()
        self._allow_private = allow_private

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for result in found:
            if reason := refusal_of(result["host"], allow_private=self._allow_private):
                raise ForbiddenAddress(reason)
        return found

    async def close(self) -> None:
        await self._resolver.close()


class Poster:
    """Connections to receivers. Use it as an async context manager, in one event loop."""

    def __init__(self, *, allow_private: bool, timeout: float = TIMEOUT_SECONDS) -> None:
        self._allow_private = allow_private
        self._timeout = timeout

    async def __aenter__(self) -> Poster:
        connector = aiohttp.TCPConnector(
            limit=0, use_dns_cache=False, resolver=_GuardedResolver(allow_private=self._allow_private)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,  # a body that unpacks to gigabytes is none of our business
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, url: str, *, message_id: str, body: str, secrets: Sequence[str]) -> Answer:
        """Send one message. Never raises for what the receiver or the network does."""
        now = datetime.now(UTC)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "prorl-webhooks",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(Webhook(secret).sign(message_id, now, body) for secret in secrets),
        }
        begun = time.monotonic()
        try:
            # aiohttp asks no resolver for a literal address.
            if reason := refusal_of(urlsplit(url).hostname or "", allow_private=self._allow_private):
                raise ForbiddenAddress(reason)
            async with self._session.post(url, data=body.encode(), headers=headers, allow_redirects=False) as response:
                status, text = response.status, (await response.content.read(_KEPT_CHARS)).decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            return Answer(None, _describe(error, self._timeout), "", time.monotonic() - begun)
        return Answer(status, "", text.replace("\0", ""), time.monotonic() - begun)


def _describe(error: Exception, timeout: float) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ForbiddenAddress):
        return str(error.os_error)
    return f"{type(error).__name__}: {error}"[:300]
