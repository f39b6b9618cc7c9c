"""What people run in a sandbox with an allow-list: pip and curl, over HTTP and HTTPS, against servers of this test."""

from __future__ import annotations

import asyncio
import functools
import http.server
import ssl
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pip
import pytest
import trustme

from sandboxes.errors import SandboxStartFailed
from sandboxes.network import open_network
from sandboxes.network.dial import Upstream
from sandboxes.network.http_head import Head
from sandboxes.network.policy import Rule
from sandboxes.network.proxy import Refusal
from sandboxes.protocol import Bind, NetworkMode, NetworkPolicy, SandboxSpec, Session
from sandboxes.registry import get_backend

INDEX = "index.example"
POLICY = NetworkPolicy(NetworkMode.ALLOW_LIST, (INDEX,))
WHEEL = "demo-1.0-py3-none-any.whl"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Quiet."""

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def index(tmp_path: Path, authority: trustme.CA) -> Iterator[dict[int, int]]:
    """A package index with one wheel; maps the port that clients ask for to the one where it is served."""
    folder = tmp_path / "index" / "simple" / "demo"
    folder.mkdir(parents=True)
    (folder / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{WHEEL}">{WHEEL}</a></body></html>')
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("demo.py", "answer = 42\n")
        wheel.writestr("demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        wheel.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("demo-1.0.dist-info/RECORD", "")
    servers = {}
    for port in (80, 443):
        handler = functools.partial(Handler, directory=str(tmp_path / "index"))
        server = servers[port] = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        if port == 443:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert(INDEX).configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
    yield {port: server.server_port for port, server in servers.items()}
    for server in servers.values():
        server.shutdown()
        server.server_close()


@pytest.fixture
def refusals() -> list[Refusal]:
    return []


@pytest.fixture
async def session(
    tmp_path: Path, index: dict[int, int], authority: trustme.CA, refusals: list[Refusal]
) -> AsyncIterator[Session]:
    async def dial(rule: Rule, head: Head) -> Upstream:
        return Upstream(*await asyncio.open_connection("127.0.0.1", index[head.port]))

    backend = get_backend("bubblewrap", tmp_path / "sandboxes")
    tools = Bind(str(Path(pip.__file__).parent), "/opt/tools/pip")
    env = {"PYTHONPATH": "/opt/tools", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_RETRIES": "0"}
    try:
        await backend.start("network", SandboxSpec(network=POLICY, binds=(tools,), env=env))
        session = await backend.connect("network")
        await open_network(session, POLICY, on_refusal=refusals.append, dial=dial)
        await session.write_file("ca.pem", authority.cert_pem.bytes())
        yield session
        await session.close()
    finally:
        await backend.stop("network")


async def test_the_full_network_is_refused_before_any_start_unless_the_node_permits_it(tmp_path: Path) -> None:
    backend = get_backend("bubblewrap", tmp_path / "sandboxes")
    with pytest.raises(SandboxStartFailed, match="PRORL_SANDBOX_FULL_NETWORK"):
        await backend.start("full", SandboxSpec(network=NetworkPolicy(NetworkMode.FULL)))
    assert await backend.list() == []


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_pip_installs_from_a_listed_index(session: Session, scheme: str) -> None:
    options = f"--cert ca.pem --trusted-host {INDEX}" if scheme == "http" else "--cert ca.pem"
    command = f"python3 -m pip install {options} --no-deps --target packages --index-url {scheme}://{INDEX}/simple/ demo"
    result = await session.bash(f"{command} && PYTHONPATH=packages python3 -c 'import demo; print(demo.answer)'", timeout=60)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "42"


async def test_pip_is_refused_every_other_index(session: Session, refusals: list[Refusal]) -> None:
    result = await session.bash("python3 -m pip download --index-url https://pypi.org/simple/ demo", timeout=60)
    assert result.exit_code != 0
    assert {refusal.destination for refusal in refusals} == {"pypi.org:443"}


async def test_curl_gets_what_is_listed_and_is_told_of_the_policy_otherwise(session: Session, index: dict[int, int]) -> None:
    path = f"{INDEX}/simple/demo/{WHEEL}"
    both = f"curl -sS http://{path} -o one && curl -sS --cacert ca.pem https://{path} -o two && cmp one two && echo same"
    assert (await session.bash(both, timeout=30)).output == "same\n"
    refused = await session.bash("curl -sS -w '%{http_code}' http://other.example/", timeout=30)
    assert "The network policy of this sandbox refuses other.example:80: it allows index.example." in refused.output
    assert refused.output.endswith("403")
    tunnel = await session.bash("curl -sS https://other.example/", timeout=30)
    assert tunnel.exit_code != 0
    assert "403" in tunnel.output
    direct = await session.bash(f"curl -sS --noproxy '*' --max-time 5 http://127.0.0.1:{index[80]}/", timeout=30)
    assert direct.exit_code == 7  # could not connect


async def test_local_servers_inside_are_not_asked_for_through_the_proxy(session: Session, refusals: list[Refusal]) -> None:
    await session.bash("echo here > page; python3 -m http.server 8123 --bind 127.0.0.1 >log 2>&1 &", timeout=10)
    page = await session.bash("curl -s --retry 20 --retry-connrefused --retry-delay 1 http://localhost:8123/page", timeout=40)
    assert page.output == "here\n"
    assert refusals == []
