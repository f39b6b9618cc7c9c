"""The proxy of allow-lists, as an HTTP client sees it. What it protects from is in the conformance suite too."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
from collections.abc import AsyncIterator

import pytest

from sandboxes.network.dial import Upstream, addresses_of, dial, dial_directly
from sandboxes.network.http_head import Head
from sandboxes.network.policy import Address, Rule
from sandboxes.network.proxy import AllowListProxy, Refusal
from sandboxes.protocol import Serve

ALLOW = ("allowed.example", "*.wild.example:8080", "rebound.example", "mirror:3141", "[2606:2800:220:1::1]")


class Origin:
    """A server that answers each request with its own bytes, and then closes."""

    def __init__(self) -> None:
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b"0123456789" if b"Content-Length: 10" in head and await reader.readexactly(10) else b""
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head + body)
        await writer.drain()
        writer.close()

    async def dial(self, rule: Rule, head: Head) -> Upstream:
        return Upstream(*await asyncio.open_connection("127.0.0.1", self.port))


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    origin = Origin()
    async with await asyncio.start_server(origin.serve, "127.0.0.1", 0) as server:
        origin.port = server.sockets[0].getsockname()[1]
        yield origin


def closing(serve: Serve) -> Serve:
    """As a forwarded port does: the connection ends with what serves it."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        writer.close()

    return handle


async def ask(proxy: Serve, request: bytes) -> bytes:
    """Everything the proxy answers to the bytes of a client."""
    async with await asyncio.start_server(closing(proxy), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer


@pytest.fixture
def refusals() -> list[Refusal]:
    return []


@pytest.fixture
def proxy(origin: Origin, refusals: list[Refusal]) -> AllowListProxy:
    return AllowListProxy(ALLOW, on_refusal=refusals.append, dial=origin.dial)


async def test_plain_requests_are_passed_on_in_origin_form(proxy: AllowListProxy) -> None:
    request = (
        b"POST http://Allowed.example./path//x?q=1%20#f HTTP/1.1\r\nhost: other.example\r\nX-Mine: 1\r\nContent-Length: 10\r\n"
        b"Proxy-Authorization: Basic abc\r\nProxy-Connection: keep-alive\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n\r\n"
        b"0123456789"
    )
    status, _, received = (await ask(proxy, request)).partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200 OK")
    assert received == (
        b"POST /path//x?q=1%20 HTTP/1.1\r\nHost: allowed.example\r\nX-Mine: 1\r\nContent-Length: 10\r\n"
        b"Connection: close\r\n\r\n0123456789"
    )


@pytest.mark.parametrize(
    ("url", "first_line", "host"),
    [
        (b"http://allowed.example", b"GET / HTTP/1.1", b"Host: allowed.example\r\n"),
        (b"HTTP://ALLOWED.example:80?q", b"GET /?q HTTP/1.1", b"Host: allowed.example\r\n"),
        (b"http://allowed.example:443/", b"GET / HTTP/1.1", b"Host: allowed.example:443\r\n"),
        (b"http://a.b.wild.example:8080/", b"GET / HTTP/1.1", b"Host: a.b.wild.example:8080\r\n"),
        (b"http://[2606:2800:220:1:0::1]/", b"GET / HTTP/1.1", b"Host: [2606:2800:220:1::1]\r\n"),
    ],
)
async def test_allowed_urls(proxy: AllowListProxy, url: bytes, first_line: bytes, host: bytes) -> None:
    answer = await ask(proxy, b"GET " + url + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert first_line in answer
    assert host in answer


async def test_tunnels_carry_anything(proxy: AllowListProxy, refusals: list[Refusal]) -> None:
    # What follows the head at once, as some clients send it, is carried too.
    answer = await ask(proxy, b"CONNECT allowed.example:443 HTTP/1.1\r\nHost: x\r\n\r\nGET /in-tunnel HTTP/1.1\r\n\r\n")
    established, _, rest = answer.partition(b"\r\n\r\n")
    assert established == b"HTTP/1.1 200 Connection established"
    assert rest.endswith(b"GET /in-tunnel HTTP/1.1\r\n\r\n")
    assert refusals == []


@pytest.mark.parametrize(
    ("request_line", "destination"),
    [
        (b"CONNECT evil.example:443", "evil.example:443"),
        (b"CONNECT allowed.example:22", "allowed.example:22"),
        (b"CONNECT 127.0.0.1:5432", "127.0.0.1:5432"),
        (b"CONNECT [::1]:5432", "[::1]:5432"),
        (b"CONNECT localhost:5432", "localhost:5432"),
        (b"CONNECT wild.example:8080", "wild.example:8080"),
        (b"GET http://evil.example/", "evil.example:80"),
        (b"GET http://allowed.example.evil.example/", "allowed.example.evil.example:80"),
        (b"GET http://a.wild.example/", "a.wild.example:80"),
        (b"GET http://10.0.0.1/", "10.0.0.1:80"),
    ],
)
async def test_what_is_not_listed_is_refused_counted_and_reported(
    proxy: AllowListProxy, refusals: list[Refusal], request_line: bytes, destination: str
) -> None:
    for count in (1, 2):
        answer = await ask(proxy, request_line + b" HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 403 Refused by the network policy of this sandbox: it allows allowed.example, ")
        assert f"The network policy of this sandbox refuses {destination}: it allows allowed.example, ".encode() in answer
        assert refusals[-1] == (destination, f"it allows {', '.join(ALLOW)}", count)


@pytest.mark.parametrize(
    ("name", "addresses"),
    [
        ("rebound.example:443", ["127.0.0.1"]),
        ("rebound.example:443", ["10.0.0.1", "::1"]),
        ("rebound.example:80", ["169.254.169.254"]),
        ("mirror:3141", ["127.0.0.2"]),
        ("mirror:3141", ["::1"]),
    ],
)
async def test_names_that_stand_for_forbidden_addresses_are_refused(name: str, addresses: list[str]) -> None:
    async def resolve(host: str, port: int) -> list[Address]:
        return [ipaddress.ip_address(address) for address in addresses]

    refusals: list[Refusal] = []
    proxy = AllowListProxy(ALLOW, on_refusal=refusals.append, dial=functools.partial(dial_directly, resolve=resolve))
    answer = await ask(proxy, b"CONNECT " + name.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert len(refusals) == 1
    assert addresses[0].encode() not in answer  # how names resolve in the cluster is nobody's business inside


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n", 400),
        (b"GET https://allowed.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET ftp://allowed.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://user@allowed.example/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://allowed.example:99999/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http:///x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://0x7f.1/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT allowed.example HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT allowed.example:0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT ::1:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET http://allowed.example/ HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000, 431),
    ],
)
async def test_what_is_no_request_to_a_proxy_is_answered_as_such(
    proxy: AllowListProxy, refusals: list[Refusal], request_bytes: bytes, status: int
) -> None:
    assert (await ask(proxy, request_bytes)).startswith(b"HTTP/1.1 %d " % status)
    assert refusals == []


async def test_names_are_resolved_as_the_host_does() -> None:
    assert ipaddress.ip_address("127.0.0.1") in await addresses_of("localhost", 80)
    assert await addresses_of("192.0.2.7", 80) == [ipaddress.ip_address("192.0.2.7")]
    with pytest.raises(OSError):
        await addresses_of("no-such-name.invalid", 80)


async def test_servers_that_cannot_be_reached_are_named() -> None:
    async def resolve(host: str, port: int) -> list[Address]:
        raise OSError("no such name")

    proxy = AllowListProxy(ALLOW, on_refusal=[].append, dial=functools.partial(dial_directly, resolve=resolve))
    answer = await ask(proxy, b"CONNECT allowed.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"allowed.example:443 cannot be reached: no such name" in answer


async def test_the_proxy_of_the_node_is_used_where_there_is_one(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    async def parent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if b"forbidden" in asked[-1]:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
        elif asked[-1].startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            writer.write(await reader.read(100))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    proxy = AllowListProxy([*ALLOW, "forbidden.example"], on_refusal=[].append, dial=dial)
    async with await asyncio.start_server(parent, "127.0.0.1", 0) as server:
        url = f"http://user:p%40ss@127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, url)
        tunnel = await ask(proxy, b"CONNECT allowed.example:443 HTTP/1.1\r\nHost: x\r\n\r\nhello")
        plain = await ask(proxy, b"GET http://allowed.example/x HTTP/1.1\r\nHost: x\r\n\r\n")
        refused = await ask(proxy, b"CONNECT forbidden.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        unlisted = await ask(proxy, b"CONNECT evil.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    credentials = b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n\r\n"
    assert tunnel.endswith(b"\r\n\r\nhello")
    assert asked[0] == b"CONNECT allowed.example:443 HTTP/1.1\r\nHost: allowed.example:443\r\n" + credentials
    assert plain.startswith(b"HTTP/1.1 200 OK")
    assert asked[1].startswith(b"GET http://allowed.example/x HTTP/1.1\r\nHost: allowed.example\r\n")
    assert asked[1].endswith(credentials)
    assert refused.startswith(b"HTTP/1.1 502 ")
    assert b"the proxy of this node answered 407" in refused
    assert unlisted.startswith(b"HTTP/1.1 403 ")
    assert len(asked) == 3
