"""The scripted server's HTTP side: the parts of vLLM's API that this platform and its users' tests speak."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from pydantic import ValidationError

from rollouts.llm.scripted.backend import Backend, Switches
from rollouts.llm.scripted.cache import BLOCK, BlockCache
from rollouts.llm.scripted.control import ControlRoutes
from rollouts.llm.scripted.engine import Engine
from rollouts.llm.scripted.errors import BadRequest, HangUp, error_response
from rollouts.llm.scripted.generating import GenerationRoutes
from rollouts.llm.scripted.pictures import picture_id
from rollouts.llm.scripted.reading import json_body
from rollouts.llm.scripted.rendering import RenderRoutes
from rollouts.llm.scripted.script import Script, echo
from rollouts.llm.scripted.template import Template, chatml
from rollouts.llm.scripted.tokenizer import ScriptedTokenizer, Tokenizer
from rollouts.llm.types import ServerAddress

VERSION = "0.32.0+scripted"
MAX_BODY = 64 * 1024 * 1024  # bytes


class ScriptedServer:
    """A running server: `async with ScriptedServer(script=...) as server`, then `server.url`.

    `delay` is in seconds before the first token of each generation, `token_delay` before each other one. `max_running`
    requests are sampled at once, the others wait; `cache_blocks` is the size of the simulated prefix cache, in blocks of 16
    ids. Paths in `without` are not there, as on a server that offers less. `running`, `finished` and `aborted` count generation
    requests; an aborted one is one whose client went away. `rendered` counts chat renders. With `pictures` the model sees, as
    `rollouts.llm.scripted.pictures` says; to a `tokenizer` given here `<picture>` and `<frame>` must then be one id each. With
    an `api_key`, everything under /v1 and /inference wants it as a bearer token.
    """

    def __init__(
        self,
        *,
        script: Script = echo,
        tokenizer: Tokenizer | None = None,
        template: Template = chatml,
        model: str = "scripted",
        max_model_len: int = 8192,
        delay: float = 0.0,
        token_delay: float = 0.0,
        max_running: int = 1024,
        cache_blocks: int = 4096,
        seed: int = 0,
        pictures: bool = False,
        api_key: str = "",
        without: Collection[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.url = ""
        self.model = model
        self.max_model_len = max_model_len
        self.switches = Switches()
        tokenizer = tokenizer or ScriptedTokenizer()
        self.picture_id = picture_id(tokenizer) if pictures else None
        backend = Backend(script, tokenizer, template, seed, model=model, pictures=pictures)
        self._engine = Engine(max_running=max_running, token_delay=token_delay, cache=BlockCache(cache_blocks))
        self._generation = GenerationRoutes(
            backend, self._engine, lambda: self.switches, model=model, max_model_len=max_model_len, delay=delay
        )
        self._rendering = RenderRoutes(backend, max_model_len)
        self._api_key = api_key
        self._without = frozenset(without)
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None

    @property
    def rendered(self) -> int:
        return self._rendering.rendered

    @property
    def running(self) -> int:
        return self._generation.counts.running

    @property
    def finished(self) -> int:
        return self._generation.counts.finished

    @property
    def aborted(self) -> int:
        return self._generation.counts.aborted

    @property
    def generated_tokens(self) -> int:
        return self._generation.counts.generated_tokens

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        control = ControlRoutes(self._engine, lambda: self.switches)
        routes = [*self._routes(), *self._rendering.routes(), *self._generation.routes(), *control.routes()]
        app.add_routes([route for route in routes if route.path not in self._without])
        # Handler cancellation is what lets an aborted request be seen as one.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def address(self, *, policy: str = "policy", policy_version: int = 0, features: Collection[str] = ()) -> ServerAddress:
        """This server as the model client takes it. `features` are of `rollouts.llm.capabilities.Feature`."""
        return ServerAddress(
            self.url,
            self.model,
            policy,
            policy_version,
            self.max_model_len,
            server_id="scripted",
            api_key=self._api_key,
            features=frozenset(features),
            picture_id=self.picture_id,
        )

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/version", self._version),
            web.get("/load", self._load),
            web.get("/metrics", self._metrics),
            web.get("/v1/models", self._models),
            web.get("/control", self._show_control),
            web.post("/control", self._control),
        ]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        guarded = request.path.startswith(("/v1/", "/inference/"))
        if self._api_key and guarded and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return error_response(401, "Unauthorized")
        try:
            return await handler(request)
        except HangUp:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)
        except BadRequest as exc:
            return error_response(exc.status, str(exc), exc.param)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.switches.healthy else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response({"server_load": self.running})

    async def _metrics(self, request: web.Request) -> web.Response:
        counts, cache = self._generation.counts, self._engine.cache
        values = {
            "num_requests_running": ("gauge", self._engine.running),
            "num_requests_waiting": ("gauge", self._engine.waiting),
            "kv_cache_usage_perc": ("gauge", min(1.0, self._engine.held_tokens() / (cache.capacity * BLOCK))),
            "prefix_cache_queries_total": ("counter", cache.queries),
            "prefix_cache_hits_total": ("counter", cache.hits),
            "prompt_tokens_total": ("counter", counts.prompt_tokens),
            "generation_tokens_total": ("counter", counts.generated_tokens),
        }
        lines = [
            f'# TYPE vllm:{name} {kind}\nvllm:{name}{{engine="0",model_name="{self.model}"}} {float(value)}\n'
            for name, (kind, value) in values.items()
        ]
        return web.Response(text="".join(lines))

    async def _models(self, request: web.Request) -> web.Response:
        served: list[dict[str, Any]] = [{"id": self.model, "root": self.model, "parent": None}]
        served += [{"id": name, "root": path, "parent": self.model} for name, path in self._engine.adapters.items()]
        shared = {"object": "model", "owned_by": "vllm", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [model | shared for model in served]})

    async def _show_control(self, request: web.Request) -> web.Response:
        counts = {"running": self.running, "finished": self.finished, "aborted": self.aborted}
        return web.json_response(self.switches.model_dump() | counts)

    async def _control(self, request: web.Request) -> web.Response:
        try:
            self.switches = Switches.model_validate(self.switches.model_dump() | await json_body(request))
        except ValidationError as exc:
            raise BadRequest(str(exc)) from exc
        return await self._show_control(request)
