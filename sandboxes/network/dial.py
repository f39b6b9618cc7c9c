"""Connecting to what an allow-list allows: directly, or through the HTTP proxy that the node itself has to use. No Django."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from sandboxes.network.http_head import Head
from sandboxes.network.policy import Address, Refused, Rule

_CONNECT_TIMEOUT = 10.0  # for one address

Resolve = Callable[[str, int], Awaitable[list[Address]]]


class Upstream(NamedTuple):
    """A connection over which the head's exchange can go on. `proxy_headers` is None when it leads to the server itself."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    proxy_headers: tuple[tuple[bytes, bytes], ...] | None = None


Dial = Callable[[Rule, Head], Awaitable[Upstream]]


async def dial(rule: Rule, head: Head) -> Upstream:
    """Through the proxy that HTTPS_PROXY or HTTP_PROXY of this process names, unless NO_PROXY excepts the host; else directly.

    A proxy resolves names by itself: what they stand for is then its administrator's to restrict.
    Raises Refused, OSError.
    """
    proxy = None if proxy_bypass(head.host) else getproxies().get("https" if head.tunnel else "http")
    return await dial_through(proxy, head) if proxy else await dial_directly(rule, head)


async def addresses_of(host: str, port: int) -> list[Address]:
    """As this host resolves names, in its order of preference. Raises OSError."""
    answer: Future[list[Address]] = Future()
    answer.set_running_or_notify_cancel()  # from now on, giving it up leaves it alone

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.set_result([ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found])
        except OSError as error:
            answer.set_exception(error)

    # Neither the loop's threads, which others need too, nor one that an ending process waits for: names may take long.
    threading.Thread(target=look_up, name=f"resolve {host}", daemon=True).start()
    return await asyncio.wrap_future(answer)


async def dial_directly(rule: Rule, head: Head, *, resolve: Resolve = addresses_of) -> Upstream:
    """The name is resolved once, and only to an address that the rule lets it have is there a connection.

    Raises Refused, OSError.
    """
    refusal: Refused | None = None
    failure: OSError | None = None
    for address in await resolve(head.host, head.port):
        try:
            rule.check_address(address)
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                return Upstream(*await asyncio.open_connection(str(address), head.port))
        except Refused as error:
            refusal = error
        except OSError as error:
            failure = error
    raise failure or refusal or OSError(f"{head.host} has no address")


async def dial_through(proxy: str, head: Head) -> Upstream:
    """Through the HTTP proxy with this URL. Raises OSError, also when the proxy refuses."""
    url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if url.scheme != "http" or url.hostname is None:
        raise OSError("the proxy of this node is not an http:// URL")
    headers = []
    if url.username is not None:
        credentials = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers.append((b"Proxy-Authorization", b"Basic " + base64.b64encode(credentials.encode())))
    async with asyncio.timeout(_CONNECT_TIMEOUT):
        reader, writer = await asyncio.open_connection(url.hostname, url.port or 80)
        if not head.tunnel:
            return Upstream(reader, writer, tuple(headers))
        try:
            lines = [b"CONNECT %b HTTP/1.1" % head.authority.encode(), b"Host: %b" % head.authority.encode()]
            writer.write(b"\r\n".join([*lines, *(b"%b: %b" % header for header in headers)]) + b"\r\n\r\n")
            answer = await reader.readuntil(b"\r\n\r\n")
            status = answer.split(maxsplit=2)[1].decode("ascii", "replace")
            if not status.startswith("2"):
                raise OSError(f"the proxy of this node answered {status}")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
            writer.transport.abort()
            raise OSError("the proxy of this node does not speak HTTP") from None
        except BaseException:
            writer.transport.abort()
            raise
    return Upstream(reader, writer)
