"""A server's own controls, as vLLM has them in its development mode (`VLLM_SERVER_DEV_MODE=1`).

What a server offers of them is known from its probe (`rollouts.llm.capabilities`). Every method raises `ModelError` when the
server does not do what it was asked within its time; none leaves a request running behind.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from rollouts.llm.errors import ModelError
from rollouts.llm.transport import Transport
from rollouts.llm.types import ServerAddress

SHORT_SECONDS = 30.0  # for what a server does at once
# Blocks of requests that have just ended may be held for a moment.
_RESETS, _RESET_PAUSE = 20, 0.25


class Control:
    """The controls of one server."""

    def __init__(self, transport: Transport, server: ServerAddress) -> None:
        self._transport = transport
        self._url = server.url.rstrip("/")
        self._api_key = server.api_key

    async def pause(self, mode: Literal["wait", "keep"], *, timeout: float) -> None:
        """Stop sampling. `wait` lets requests end first, `keep` leaves them where they are until `resume`."""
        await self._post(f"/pause?mode={mode}", timeout=timeout)

    async def resume(self) -> None:
        """Go on sampling."""
        await self._post("/resume")

    async def abort_requests(self) -> None:
        """End all requests; each is answered with what it has so far."""
        await self._post("/abort_requests", {})

    async def reload(self, path: str, *, timeout: float) -> None:
        """Read all weights anew, from a directory."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._post("/collective_rpc", body, timeout=timeout)

    async def load_lora(self, name: str, path: str, *, timeout: float) -> None:
        """Load an adapter, in place of the one of that name if there is one."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        await self._post("/v1/load_lora_adapter", body, timeout=timeout)

    async def reset_prefix_cache(self, *, recompute_running: bool) -> None:
        """Forget what the old weights made of prompts; with `recompute_running` also for requests that were kept."""
        path = "/reset_prefix_cache" + ("?reset_running_requests=true" if recompute_running else "")
        for _ in range(_RESETS):
            answer = await self._post(path)
            # Older servers answer with nothing once it is done.
            if not answer or _object(answer).get("success", True):
                return
            await asyncio.sleep(_RESET_PAUSE)
        raise ModelError(f"{self._url} does not let go of its prefix cache, which the old weights made", retryable=True)

    async def forget_pictures(self) -> None:
        """Forget what the old weights made of pictures. Only while it samples nothing: running requests would miss theirs."""
        await self._post("/reset_encoder_cache")

    async def label(self, version: int) -> None:
        """Have the server name its weights by this number from now on."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def weight_version(self) -> str:
        """What the server calls its weights; "default" when nobody has told it."""
        url = f"{self._url}/weight_info"
        answer = await self._transport.request("GET", url, api_key=self._api_key, timeout=SHORT_SECONDS)
        return str(answer.get("weight_version", ""))

    async def sleep(self, level: int, *, timeout: float) -> None:
        """Give up GPU memory: level 1 moves the weights to the host's, level 2 drops them. Requests in flight are aborted."""
        await self._post(f"/sleep?level={level}&mode=abort", timeout=timeout)

    async def wake(self, tags: tuple[str, ...] = (), *, timeout: float) -> None:
        """Take memory again: of what `tags` names (`weights`, `kv_cache`), else of everything."""
        query = "&".join(f"tags={tag}" for tag in tags)
        await self._post(f"/wake_up?{query}" if query else "/wake_up", timeout=timeout)

    async def _post(self, path: str, body: dict[str, Any] | None = None, *, timeout: float = SHORT_SECONDS) -> bytes:
        return await self._transport.command("POST", self._url + path, body, api_key=self._api_key, timeout=timeout)


def _object(answer: bytes) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
