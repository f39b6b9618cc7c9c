"""vLLM's calls for trainers (development mode): pauses, new weights, their label, adapters, sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast, get_args

from aiohttp import web

from rollouts.llm.scripted.backend import Switches
from rollouts.llm.scripted.engine import Engine, PauseMode
from rollouts.llm.scripted.errors import BadRequest
from rollouts.llm.scripted.reading import json_body


class ControlRoutes:
    """Handlers over one engine."""

    def __init__(self, engine: Engine, switches: Callable[[], Switches]) -> None:
        self._engine = engine
        self._switches = switches

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.get("/is_paused", self._is_paused),
            web.post("/abort_requests", self._abort_requests),
            web.post("/collective_rpc", self._collective_rpc),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.post("/reset_encoder_cache", self._reset_encoder_cache),
            web.get("/weight_info", self._weight_info),
            web.post("/update_weight_version", self._update_weight_version),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/is_sleeping", self._is_sleeping),
            web.post("/v1/load_lora_adapter", self._load_adapter),
            web.post("/v1/unload_lora_adapter", self._unload_adapter),
        ]

    async def _pause(self, request: web.Request) -> web.Response:
        await self._engine.pause(_mode(request))
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._engine.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._engine.paused is not None})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        await json_body(request)
        return web.json_response({"status": "aborted", "aborted": self._engine.abort_all()})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        method = body.get("method")
        if method is None:
            raise BadRequest("Missing 'method' in request body")
        if method != "reload_weights":
            raise BadRequest(_failed(f"'CPUWorker' object has no attribute '{method}'"), status=500)
        switches = self._switches()
        await asyncio.sleep(switches.reload_seconds)
        if switches.fail_reload:
            raise BadRequest(_failed("scripted failure"), status=500)
        self._engine.load(str((body.get("kwargs") or {}).get("weights_path") or ""))
        return web.json_response({"results": [None]})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        also_running = request.query.get("reset_running_requests", "").lower() == "true"
        return web.json_response({"success": self._engine.forget(also_running=also_running)})

    async def _reset_encoder_cache(self, request: web.Request) -> web.Response:
        self._engine.pictures.clear()
        return web.Response()

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._engine.label})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        version = _text(await json_body(request), "new_version")
        self._engine.label = version
        return web.json_response({"success": True, "new_version": version})

    async def _sleep(self, request: web.Request) -> web.Response:
        level = int(request.query.get("level", "1"))
        await self._engine.pause(_mode(request))
        self._engine.asleep = True
        if level == 2:  # the weights are gone until they are loaded again
            self._engine.weights = "(none)"
        return web.json_response({"status": "sleeping", "level": level})

    async def _wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", None)
        if tags is None or "kv_cache" in tags:
            self._engine.asleep = False
            self._engine.resume()
        return web.json_response({"status": "awake", "tags": tags})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._engine.asleep})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        if self._switches().fail_reload:
            raise BadRequest(f"Loading lora {name} failed: No adapter found for {path}", status=404)
        if name in self._engine.adapters and not body.get("load_inplace"):
            raise BadRequest(f"The lora adapter '{name}' has already been loaded.")
        self._engine.adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = _text(await json_body(request), "lora_name")
        if self._engine.adapters.pop(name, None) is None:
            raise BadRequest(f"The lora adapter '{name}' cannot be found.", status=404)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _mode(request: web.Request) -> PauseMode:
    mode = request.query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise BadRequest("1 validation error: mode: Input should be 'abort', 'wait' or 'keep'", param="query.mode")
    return cast(PauseMode, mode)


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"1 validation error: body.{name}: Input should be a valid string", param=f"body.{name}")
    return value


def _failed(why: str) -> str:
    return (
        f"Call to collective_rpc method failed: Worker failed with error '{why}', please check the stack trace above for the "
        "root cause"
    )
