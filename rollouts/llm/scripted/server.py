"""The scripted server's HTTP side: the parts of vLLM's API that this platform and its users' tests speak."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from pydantic import ValidationError

from rollouts.llm.scripted.backend import Backend, Switches
from rollouts.llm.scripted.dialect import (
    BadRequest,
    Dialect,
    HangUp,
    chat_answer,
    completion_answer,
    error_response,
    read_limits,
    read_messages,
)
from rollouts.llm.scripted.script import Script, echo
from rollouts.llm.scripted.template import Template, chatml
from rollouts.llm.scripted.tokenizer import ScriptedTokenizer, Tokenizer
from rollouts.llm.types import ServerAddress

VERSION = "0.32.0+scripted"
MAX_BODY = 64 * 1024 * 1024  # bytes


class ScriptedServer:
    """A running server: `async with ScriptedServer(script=...) as server`, then `server.url`.

    `delay` is in seconds for each generation. `running`, `finished` and `aborted` count generation requests; an aborted one is
    one whose client went away. `rendered` counts chat renders. With an `api_key`, everything under /v1 wants it as a bearer
    token.
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
        seed: int = 0,
        api_key: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.url = ""
        self.model = model
        self.max_model_len = max_model_len
        self.switches = Switches()
        self.running = self.finished = self.aborted = 0
        self.rendered = self.prompt_tokens = self.generated_tokens = 0
        self._backend = Backend(script, tokenizer or ScriptedTokenizer(), template, seed)
        self._delay = delay
        self._api_key = api_key
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/load", self._load),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
                web.get("/control", self._show_control),
                web.post("/control", self._control),
            ]
        )
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

    def address(self, *, policy: str = "policy", policy_version: int = 0) -> ServerAddress:
        """This server as the model client takes it."""
        return ServerAddress(
            self.url, self.model, policy, policy_version, self.max_model_len, server_id="scripted", api_key=self._api_key
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        wanted = f"Bearer {self._api_key}" if self._api_key and request.path.startswith("/v1/") else None
        if wanted and request.headers.get("Authorization") != wanted:
            return error_response(401, "Unauthorized")
        try:
            return await handler(request)
        except HangUp:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)
        except BadRequest as exc:
            return error_response(400, str(exc))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.switches.healthy else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response({"server_load": self.running})

    async def _metrics(self, request: web.Request) -> web.Response:
        values = {
            "num_requests_running": ("gauge", self.running),
            "num_requests_waiting": ("gauge", 0),
            "kv_cache_usage_perc": ("gauge", 0),
            "prompt_tokens_total": ("counter", self.prompt_tokens),
            "generation_tokens_total": ("counter", self.generated_tokens),
        }
        lines = [
            f'# TYPE vllm:{name} {kind}\nvllm:{name}{{engine="0",model_name="{self.model}"}} {value:.1f}\n'
            for name, (kind, value) in values.items()
        ]
        return web.Response(text="".join(lines))

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model", "owned_by": "scripted", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [entry]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if "messages" in body:
            self.rendered += 1
            ids = self._backend.render(read_messages(body), bool(body.get("add_generation_prompt", True)))
        else:
            ids = self._backend.tokenizer.encode(str(body.get("prompt", "")))
        return web.json_response({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        ids = self._known_ids((await self._body(request)).get("tokens"))
        return web.json_response({"prompt": self._backend.tokenizer.decode(ids, skip_special=False)})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        prompt = body.get("prompt")
        ids = self._backend.tokenizer.encode(prompt) if isinstance(prompt, str) else self._known_ids(prompt)
        return await self._generate(body, ids, int(body.get("max_tokens") or 16), completion_answer)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        ids = self._backend.render(read_messages(body), True)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or max(1, self.max_model_len - len(ids))
        return await self._generate(body, ids, int(wanted), chat_answer)

    async def _generate(self, body: dict[str, Any], ids: list[int], max_tokens: int, dialect: Dialect) -> web.StreamResponse:
        if body.get("stream"):
            raise BadRequest("the scripted server does not stream")
        if len(ids) + max_tokens > self.max_model_len:
            raise BadRequest(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {max_tokens} "
                f"output tokens and your prompt contains {len(ids)} input tokens."
            )
        self.running += 1
        try:
            answer = await self._answer(body, ids, max_tokens, dialect)
            self.finished += 1
            return answer
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, body: dict[str, Any], ids: list[int], max_tokens: int, dialect: Dialect) -> web.StreamResponse:
        if self.switches.fail_next > 0:
            self.switches.fail_next -= 1
            return self._failure(self.switches.status)
        reply, rng = self._backend.decide(ids, float(body.get("temperature", 1.0)))
        await asyncio.sleep(reply.delay or (self._delay if self.switches.delay is None else self.switches.delay))
        if reply.status != 200:
            return self._failure(reply.status)
        sampled = self._backend.sample(reply, rng, read_limits(body, max_tokens))
        self.prompt_tokens += len(ids)
        self.generated_tokens += len(sampled.token_ids)
        answer = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": self.model} | dialect(
            sampled,
            ids,
            with_ids=bool(body.get("return_token_ids")) and reply.flaw != "omit_ids" and not self.switches.omit_token_ids,
            with_logprobs=not (body.get("logprobs") is None or body["logprobs"] is False) and not self.switches.omit_logprobs,
        )
        return web.json_response(answer)

    def _failure(self, status: int) -> web.Response:
        if status == 0:
            raise HangUp
        response = error_response(status, "scripted failure")
        if self.switches.retry_after is not None:
            response.headers["Retry-After"] = str(self.switches.retry_after)
        return response

    async def _show_control(self, request: web.Request) -> web.Response:
        counts = {"running": self.running, "finished": self.finished, "aborted": self.aborted}
        return web.json_response(self.switches.model_dump() | counts)

    async def _control(self, request: web.Request) -> web.Response:
        try:
            self.switches = Switches.model_validate(self.switches.model_dump() | await self._body(request))
        except ValidationError as exc:
            raise BadRequest(str(exc)) from exc
        return await self._show_control(request)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = json.loads(await request.read())
        except ValueError as exc:
            raise BadRequest(f"the body is not JSON: {exc}") from exc
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        return body

    def _known_ids(self, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise BadRequest("expected a list of token ids")
        for token in value:
            if not 0 <= token < self._backend.tokenizer.size:
                raise BadRequest(f"Token id {token} is out of vocabulary")
        return value
