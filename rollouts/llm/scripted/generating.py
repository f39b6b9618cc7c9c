"""The handlers of the endpoints that sample: from a request to its answer or stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from aiohttp import web

from rollouts.llm.scripted.answers import (
    LAST_EVENT,
    ChatCompletions,
    Completions,
    Dialect,
    Generate,
    Part,
    event,
)
from rollouts.llm.scripted.backend import Backend, Switches
from rollouts.llm.scripted.engine import Engine
from rollouts.llm.scripted.errors import ENGINE_DEAD, BadRequest, HangUp, check_context, error_response
from rollouts.llm.scripted.messages import read_messages
from rollouts.llm.scripted.probabilities import Probabilities
from rollouts.llm.scripted.reading import Asked, json_body, read_chat, read_completion, read_generate
from rollouts.llm.scripted.script import Reply
from rollouts.llm.scripted.sequences import Choice, Given, Request

Writer = type[Completions] | type[ChatCompletions] | type[Generate]


class Counts:
    """Of generation requests, and of tokens. An aborted request is one whose client went away."""

    def __init__(self) -> None:
        self.running = self.finished = self.aborted = 0
        self.prompt_tokens = self.generated_tokens = 0


class GenerationRoutes:
    """Handlers over one engine; `delay` is in seconds before each first token."""

    def __init__(
        self,
        backend: Backend,
        engine: Engine,
        switches: Callable[[], Switches],
        *,
        model: str,
        max_model_len: int,
        delay: float,
    ) -> None:
        self.counts = Counts()
        self._backend = backend
        self._engine = engine
        self._switches = switches
        self._model = model
        self._max_model_len = max_model_len
        self._delay = delay

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat_completions),
            web.post("/inference/v1/generate", self._generate),
        ]

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        asked = read_completion(await json_body(http))
        prompt = asked.prompt
        if not prompt:
            message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise BadRequest(message, param="prompt")
        ids = self._backend.tokenizer.encode(prompt) if isinstance(prompt, str) else self._backend.known_ids(prompt)
        return await self._sample(http, asked, Given(ids), Completions)

    async def _chat_completions(self, http: web.Request) -> web.StreamResponse:
        body = await json_body(http)
        given = self._backend.render(read_messages(body), True)
        return await self._sample(http, read_chat(body), given, ChatCompletions)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        asked = read_generate(await json_body(http))
        ids = self._backend.known_ids(asked.prompt)
        given = self._backend.given(ids, asked.pictures, otherwise=self._switches().expand_otherwise)
        return await self._sample(http, asked, given, Generate)

    async def _sample(self, http: web.Request, asked: Asked, given: Given, writer: Writer) -> web.StreamResponse:
        model = asked.model or self._model
        if model != self._model and model not in self._engine.adapters:
            aliases = ", ".join([self._model, *self._engine.adapters])
            raise BadRequest(f"The model `{model}` does not exist. Valid aliases: {aliases}.", param="model", status=404)
        room = self._max_model_len - len(given.ids)
        check_context(len(given.ids), room if asked.max_tokens is None else asked.max_tokens, self._max_model_len)
        max_tokens = room if asked.max_tokens is None else min(asked.max_tokens, room)
        request = Request(model, given)
        self.counts.running += 1
        try:
            answer = await self._answer(http, asked, request, max_tokens, writer)
            self.counts.finished += 1
            self.counts.prompt_tokens += len(given.ids)
            self.counts.generated_tokens += request.sampled_count
            return answer
        except asyncio.CancelledError:
            self.counts.aborted += 1
            raise
        finally:
            self.counts.running -= 1

    async def _answer(
        self, http: web.Request, asked: Asked, request: Request, max_tokens: int, writer: Writer
    ) -> web.StreamResponse:
        switches = self._switches()
        if switches.broken:
            return error_response(500, ENGINE_DEAD)
        if switches.fail_next > 0:
            switches.fail_next -= 1
            return self._failure(switches.status)
        async with self._engine.slot(request):
            if not self._engine.pictures.look_up(place.data for place in request.given.places):
                switches.broken = True
                return error_response(500, ENGINE_DEAD)
            reply = self._decide(asked, request, max_tokens)
            delay = reply.delay or (self._delay if switches.delay is None else switches.delay)
            if reply.status != 200:
                await asyncio.sleep(delay)
                return self._failure(reply.status)
            dialect = self._dialect(asked, request, reply, writer)
            steps = self._engine.sample(request, delay, step_by_step=asked.stream)
            if asked.stream:
                return await self._stream(http, asked, request, dialect, steps)
            async for _ in steps:
                pass
            return web.json_response(dialect.answer([self._part(choice, 0, "") for choice in request.choices]))

    def _decide(self, asked: Asked, request: Request, max_tokens: int) -> Reply:
        """Plan every choice; how the first one is answered goes for all."""
        replies = []
        for index in range(asked.n):
            reply, rng = self._backend.decide(request.given, asked.temperature, asked.seed, index, self._engine.label)
            request.add(self._backend.plan(reply, rng, asked.limits(max_tokens), self._switches().flaw))
            replies.append(reply)
        return replies[0]

    def _dialect(self, asked: Asked, request: Request, reply: Reply, writer: Writer) -> Dialect:
        wanted = asked.wanted
        if reply.flaw == "omit_ids" or self._switches().omit_token_ids:
            wanted = replace(wanted, token_ids=False)
        if self._switches().omit_logprobs:
            wanted = replace(wanted, logprobs=None)
        probabilities = Probabilities(self._backend.tokenizer, self._engine.weights_of(request.model))
        return writer(request, wanted, probabilities)

    async def _stream(
        self, http: web.Request, asked: Asked, request: Request, dialect: Dialect, steps: AsyncIterator[None]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        told = [(0, "")] * asked.n  # of each choice: how many ids, and which text
        ended = [False] * asked.n
        async for _ in steps:
            for choice in request.choices:
                if ended[choice.index]:
                    continue
                part = self._part(choice, *told[choice.index])
                for chunk in dialect.chunks(part):
                    await response.write(event(chunk))
                told[choice.index] = (len(choice.token_ids), told[choice.index][1] + part.text)
                ended[choice.index] = part.last
        if asked.wanted.usage:
            await response.write(event(dialect.usage()))
        await response.write(LAST_EVENT)
        return response

    def _part(self, choice: Choice, start: int, told: str) -> Part:
        text = choice.text(lambda ids: self._backend.tokenizer.decode(ids, skip_special=True))
        return Part(choice, start, text[len(told) :], first=start == 0, last=choice.finish_reason is not None)

    def _failure(self, status: int) -> web.Response:
        if status == 0:
            raise HangUp
        response = error_response(status, "scripted failure")
        if (seconds := self._switches().retry_after) is not None:
            response.headers["Retry-After"] = str(seconds)
        return response
