"""What a sandbox can reach: forwarded ports, and the network policies built on them. No Django."""

from __future__ import annotations

from collections.abc import Callable

from sandboxes.errors import SandboxProtocolError
from sandboxes.network.dial import Dial, dial
from sandboxes.network.proxy import AllowListProxy, Refusal
from sandboxes.protocol import NetworkMode, NetworkPolicy, Session

PROXY_PORT = 3128

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
_NO_PROXY_VARIABLES = ("no_proxy", "NO_PROXY")
_OWN_HOSTS = "localhost,127.0.0.1,::1"


async def open_network(
    session: Session, policy: NetworkPolicy, *, on_refusal: Callable[[Refusal], None], dial: Dial = dial
) -> None:
    """Give a sandbox what its policy allows for as long as `session` is open: to be called for every session.

    Programs find the proxy by the usual environment variables. Its port is PROXY_PORT, or a free one where something inside has
    taken that.
    """
    if policy.mode is not NetworkMode.ALLOW_LIST:
        return
    proxy = AllowListProxy(policy.allow, on_refusal=on_refusal, dial=dial)
    try:
        port = await session.forward(proxy, port=PROXY_PORT)
    except SandboxProtocolError:
        port = await session.forward(proxy)
    variables = dict.fromkeys(_PROXY_VARIABLES, f"http://127.0.0.1:{port}") | dict.fromkeys(_NO_PROXY_VARIABLES, _OWN_HOSTS)
    await session.set_env(variables)
