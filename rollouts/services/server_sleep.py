"""Lending a server's memory to training on the same GPU (colocated training), and taking it back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from rollouts.llm.capabilities import Feature
from rollouts.llm.engines.control import Control
from rollouts.llm.errors import ModelError
from rollouts.llm.transport import Transport
from rollouts.models import LLMServer

from .assign import address_of
from .errors import Conflict, FieldError, Unavailable
from .server_health import wake_dispatcher

# Processes look at their servers once a second: after this none begins a call there any more.
_SEEN_SECONDS = 1.5
_CONTROL_SECONDS = 120.0


def sleep_server(*, server: LLMServer, level: int = 1) -> None:
    """Let no call begin on a server, end those in flight, and have it give up its memory.

    Level 1 moves the weights to the host's memory, level 2 drops them. Replies under way go on from their ids, on another
    server or once it is awake.
    """
    _check(server)
    awake = LLMServer.objects.filter(id=server.id, hold=LLMServer.Hold.NONE).exclude(admission=LLMServer.Admission.ASLEEP)
    if not awake.update(admission=LLMServer.Admission.ASLEEP):
        raise Conflict("It is asleep already, or its weights are being changed.")
    time.sleep(_SEEN_SECONDS)
    try:
        _tell(server, lambda control: control.sleep(level, timeout=_CONTROL_SECONDS))
    except Unavailable:
        LLMServer.objects.filter(id=server.id, admission=LLMServer.Admission.ASLEEP).update(admission=server.admission)
        raise


def wake_server(*, server: LLMServer, tags: Sequence[str] = ()) -> None:
    """Have a server take its memory again: all of it, or what `tags` names (weights, kv_cache), in the order of the calls.

    It takes calls again once it has its KV cache.
    """
    _check(server)
    if server.admission != LLMServer.Admission.ASLEEP:
        raise Conflict("The server is not asleep.")
    _tell(server, lambda control: control.wake(tuple(tags), timeout=_CONTROL_SECONDS))
    if not tags or "kv_cache" in tags:
        LLMServer.objects.filter(id=server.id, admission=LLMServer.Admission.ASLEEP).update(
            admission=LLMServer.Admission.OPEN, last_probe_at=None
        )
        wake_dispatcher()


def _check(server: LLMServer) -> None:
    if Feature.SLEEP not in server.capabilities.get("features", ()):
        raise Conflict(
            "The server offers no /sleep and /wake_up. Start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, and "
            "register it again."
        )


def _tell(server: LLMServer, what: Callable[[Control], Awaitable[None]]) -> None:
    address = address_of(server)

    async def tell() -> None:
        transport = Transport()
        try:
            await what(Control(transport, address))
        finally:
            await transport.close()

    try:
        asyncio.run(tell())
    except ModelError as error:
        raise Unavailable(f"The server did not do it: {error}", [FieldError("", str(error))]) from error
