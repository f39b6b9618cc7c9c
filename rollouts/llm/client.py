"""The client of vLLM-compatible model servers: ids in, sampled ids and logprobs out."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rollouts.llm.answers import token_list
from rollouts.llm.capabilities import Feature
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.messages import as_sent, numbered_pictures, refuse_pictures
from rollouts.llm.placed import rendered
from rollouts.llm.tokens import LocalTokenizers
from rollouts.llm.transport import Transport
from rollouts.llm.turns import Tools, TurnRenderer
from rollouts.llm.types import ChatMessage, Completion, Piece, Sampling, ServerAddress, TokenPrompt
from rollouts.llm.wire import Streamed, Wire, wire_of
from sandboxes.protocol import Picture

# What is to be done with each piece of a streamed reply; it may wait, and then the stream does.
Emit = Callable[[Piece], Awaitable[None]]

HELPER_TIMEOUT = 30.0  # seconds, for calls that sample nothing
NO_PICTURES: Mapping[str, Picture] = MappingProxyType({})
_CONTEXT_FULL = re.compile(r"maximum context length|maximum model length|context_length_exceeded", re.IGNORECASE)


class ModelClient:
    """One per worker process; all its rollouts share the connections and the cached template renders.

    Every method raises `ModelError` when the server does not do its part.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport()
        self._tokenizers = LocalTokenizers()
        self.turns = TurnRenderer(self.render)

    async def generate(
        self,
        server: ServerAddress,
        prompt: TokenPrompt,
        sampling: Sampling,
        *,
        timeout: float,
        emit: Emit | None = None,
        pictures: Mapping[str, Picture] = NO_PICTURES,
    ) -> Completion:
        """Sample one reply to exactly these ids. `timeout` is in seconds and spans retries.

        `pictures` has the data of all that are placed in the prompt, by digest. With `emit` the reply is streamed, and every
        piece is given to it as it comes. Raises `ContextOverflow`, without a call when the prompt alone fills the model's
        context.
        """
        room = server.max_model_len - len(prompt.ids)
        if room <= 0:
            raise ContextOverflow(f"the prompt has {len(prompt.ids)} tokens, the model's context {server.max_model_len}")
        wire = wire_of(server, prompt, pictures)
        body = wire.body(server, prompt, sampling, min(sampling.max_tokens, room))
        started = time.monotonic()
        with _context_overflow():
            if emit is None:
                answer = await self._post(server, wire.path, body, timeout)
                completion = wire.completion(answer, time.monotonic() - started)
            else:
                completion = (await self._stream(server, wire, body, timeout, emit)).completion(time.monotonic() - started)
        if not completion.token_ids and completion.finish_reason != "abort" and Feature.TOKEN_IDS in server.features:
            raise ModelError(f"{server.url} returned no token ids, although it was found to do so", retryable=True)
        return _with_sure_spans(completion)

    async def render(
        self,
        server: ServerAddress,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenPrompt:
        """The ids of these messages under the model's own chat template.

        Made in this process where `server.tokenizer` is given, else by the server; with pictures always by the server, as only
        that knows how many ids they become. Raises `ModelError` of status 400 when the template refuses the messages, or when
        they hold what the server does not take; `ContextOverflow` when a server says that they are too long for it.
        """
        pictures = [picture for _, picture in numbered_pictures(messages)]
        if pictures and server.picture_id is None:
            refuse_pictures(messages, f"{server.model} at {server.url} takes none, as far as was found at its registration")
        if server.tokenizer and not pictures:
            tokenizer = await self._tokenizers.get(server.tokenizer)
            return TokenPrompt(
                await tokenizer.render(
                    messages, add_generation_prompt=add_generation_prompt, tools=tools, template_kwargs=template_kwargs
                )
            )
        body: dict[str, Any] = {
            "model": server.model,
            "messages": as_sent(messages),
            "add_generation_prompt": add_generation_prompt,
            "add_special_tokens": False,
        }
        if tools:
            body["tools"] = list(tools)
        if template_kwargs:
            body["chat_template_kwargs"] = dict(template_kwargs)
        if pictures:
            # Without a choice of tools, not even by default, vLLM needs no tool parser and leaves none of the tools out.
            body |= {"mm_payload": "none", "tool_choice": None}
            with _context_overflow(), _refused_pictures():
                return rendered(await self._post(server, "/v1/chat/completions/render", body, HELPER_TIMEOUT), pictures)
        return TokenPrompt(token_list(await self._post(server, "/tokenize", body, HELPER_TIMEOUT), "tokens"))

    async def chat(self, server: ServerAddress, body: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """The answer of `/v1/chat/completions`: for servers that take no ids."""
        return await self._post(server, "/v1/chat/completions", {"model": server.model, **body}, timeout)

    async def encode(self, server: ServerAddress, text: str) -> list[int]:
        """The ids of a raw prompt, as the server's own `/v1/completions` would read it."""
        return token_list(
            await self._post(server, "/tokenize", {"model": server.model, "prompt": text}, HELPER_TIMEOUT), "tokens"
        )

    async def detokenize(self, server: ServerAddress, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included; for people to read, never to encode again."""
        if server.tokenizer:
            return (await self._tokenizers.get(server.tokenizer)).decode(token_ids)
        answer = await self._post(server, "/detokenize", {"model": server.model, "tokens": list(token_ids)}, HELPER_TIMEOUT)
        text = answer.get("prompt")
        if not isinstance(text, str):
            raise ModelError("the answer has no 'prompt'", retryable=True)
        return text

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._transport.close()

    async def _stream(self, server: ServerAddress, wire: Wire, body: dict[str, Any], timeout: float, emit: Emit) -> Streamed:
        streamed = Streamed(wire)

        async def take(chunk: dict[str, Any]) -> None:
            if (piece := streamed.add(chunk)) is not None:
                await emit(piece)

        url = server.url.rstrip("/") + wire.path
        await self._transport.stream(url, body | {"stream": True}, take, api_key=server.api_key, timeout=timeout)
        return streamed

    async def _post(self, server: ServerAddress, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        url = server.url.rstrip("/") + path
        return await self._transport.request("POST", url, body, api_key=server.api_key, timeout=timeout)


@contextlib.contextmanager
def _context_overflow() -> Iterator[None]:
    """Turns a server's refusal of a prompt that is too long into `ContextOverflow`."""
    try:
        yield
    except ModelError as exc:
        if exc.status == 400 and _CONTEXT_FULL.search(str(exc)):
            raise ContextOverflow(str(exc)) from exc
        raise


@contextlib.contextmanager
def _refused_pictures() -> Iterator[None]:
    """Turns a 500 into a refusal: vLLM answers so to pictures that its processor cannot take, or the template leaves out.

    As a failure of the server it would count against that, and any agent could have a healthy one given up.
    """
    try:
        yield
    except ModelError as exc:
        if exc.status == 500:
            raise ModelError(f"the pictures cannot be shown: {exc}", retryable=False, status=400) from exc
        raise


def _with_sure_spans(completion: Completion) -> Completion:
    """What a server says of its weights counts when it says it of every id."""
    covered = sum(span.tokens for span in completion.spans)
    return completion if covered == len(completion.token_ids) else replace(completion, spans=())
