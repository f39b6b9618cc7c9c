"""Network policies: what is reached, and that nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxes.network import open_network
from sandboxes.network.dial import Upstream, dial_directly
from sandboxes.network.http_head import Head
from sandboxes.network.policy import Address, Rule
from sandboxes.network.proxy import Refusal
from sandboxes.network.relay import relay_to
from sandboxes.protocol import NetworkMode, NetworkPolicy, SandboxSpec
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, value_of

_ALLOWED = "listed.example"
_REBOUND = "rebound.example"  # listed, and resolves to the host's loopback
_POLICY = NetworkPolicy(NetworkMode.ALLOW_LIST, (_ALLOWED, _REBOUND))


@contextlib.asynccontextmanager
async def _web_server() -> AsyncIterator[int]:
    """A server at the host's loopback that answers "hello", and its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


_FETCH = """
import urllib.request, urllib.error
def fetch(url):
    try:
        return urllib.request.urlopen(url, timeout=10).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code}"
    except OSError as error:
        return "nothing"
"""


@check("without a network a forwarded port still reaches its service of the host, which nothing else inside does")
async def forward_without_a_network(bench: Bench) -> None:
    async with _web_server() as service, bench.sandbox() as session:
        port = await session.forward(relay_to("127.0.0.1", service))
        answers = await value_of(
            session, f"{_FETCH}\n[fetch('http://127.0.0.1:{port}/'), fetch('http://127.0.0.1:{service}/')]"
        )
        expect_equal(answers, ["hello", "nothing"], "what the forwarded and the host's own port answered")


async def _dial(rule: Rule, head: Head, *, service: int) -> Upstream:
    """The listed host is the check's own server; the other one is dialled as always, but for what its name resolves to."""

    async def resolve(host: str, port: int) -> list[Address]:
        return [ipaddress.ip_address("127.0.0.1")]

    if head.host == _ALLOWED:
        return Upstream(*await asyncio.open_connection("127.0.0.1", service))
    return await dial_directly(rule, head, resolve=resolve)


def _ignore(refusal: Refusal) -> None: ...


@check("an allow-list lets listed hosts through its proxy, in commands and cells, and refuses all others with 403")
async def allow_listed_hosts(bench: Bench) -> None:
    refusals: list[Refusal] = []
    urls = [f"http://{host}/" for host in (_ALLOWED, "other.example", f"sub.{_ALLOWED}", _REBOUND, "10.0.0.1")]
    async with _web_server() as service, bench.sandbox(SandboxSpec(network=_POLICY)) as session:
        dial = functools.partial(_dial, service=service)
        await open_network(session, _POLICY, on_refusal=refusals.append, dial=dial)
        answers = await value_of(session, f"{_FETCH}\n[fetch(url) for url in {urls}]")
        expect_equal(answers, ["hello", *["403"] * 4], "what the hosts answered")
        expect_equal([refusal.number for refusal in refusals], [1, 2, 3, 4], "the numbers of the refusals")
        tunnel = f"""
import http.client
def tunnel(host, port):
    connection = http.client.HTTPConnection("127.0.0.1", int(urllib.request.getproxies()["https"].rpartition(":")[2]))
    connection.set_tunnel(host, port)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    except OSError as error:
        return str(error)
[tunnel({_ALLOWED!r}, 443), *["403" in tunnel(host, {service}) for host in ("127.0.0.1", "localhost", "[::1]")]]
"""
        expect_equal(await value_of(session, tunnel), ["hello", True, True, True], "what tunnels led to")
        command = f'python3 -c "import urllib.request as u; print(u.urlopen({urls[0]!r}).read().decode())"'
        result = await session.bash(command, timeout=20)
        expect_equal((result.exit_code, result.output), (0, "hello\n"), "what a command got")


@check("an allow-list opens nothing but its proxy: no interface, no route, no name, no loopback of the host")
async def open_nothing_else(bench: Bench) -> None:
    async with _web_server() as service, bench.sandbox(SandboxSpec(network=_POLICY)) as session:
        await open_network(session, _POLICY, on_refusal=_ignore, dial=functools.partial(_dial, service=service))
        reached = await value_of(
            session,
            f"""
import socket
def works(step):
    try:
        step()
        return True
    except OSError:
        return False
[works(step) for step in (
    lambda: socket.create_connection(("127.0.0.1", {service}), 3),
    lambda: socket.create_connection(("192.0.2.1", 80), 3),
    lambda: socket.getaddrinfo({_ALLOWED!r}, 80),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)),
)]
""",
        )
        expect_equal(reached, [False] * 4, "whether anything was reached beside the proxy")


@check("something inside that took the proxy's port costs a session nothing: its proxy gets another one")
async def find_another_port(bench: Bench) -> None:
    async with _web_server() as service, bench.sandbox(SandboxSpec(network=_POLICY)) as session:
        taken = await session.python("import socket\ntaken = socket.create_server(('127.0.0.1', 3128))", timeout=30)
        expect(taken.error is None, f"the port could not be taken: {taken}")
        await open_network(session, _POLICY, on_refusal=_ignore, dial=functools.partial(_dial, service=service))
        expect_equal(await value_of(session, f"{_FETCH}\nfetch('http://{_ALLOWED}/')"), "hello", "the answer")


@check("the full network is the host's: a service at its loopback answers, and names resolve as there")
async def share_the_full_network(bench: Bench) -> None:
    spec = SandboxSpec(network=NetworkPolicy(NetworkMode.FULL))
    async with _web_server() as service, bench.sandbox(spec) as session:
        answers = await value_of(session, f"{_FETCH}\nfetch('http://127.0.0.1:{service}/')")
        expect_equal(answers, "hello", "what the host's service answered")
        for path in ("/etc/hosts", "/etc/resolv.conf"):
            if Path(path).exists():
                expect_equal(await session.read_file(path), Path(path).read_bytes(), f"what {path} says")
