"""OpenAI's Completions: a raw prompt, as text or ids."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rollouts.gateway.dialects.base import Part, Remembered, sse
from rollouts.gateway.dialects.openai_chat import MAX_CHOICES, read_wishes
from rollouts.gateway.dialects.openai_common import error_body, usage
from rollouts.gateway.errors import CallRefused
from rollouts.gateway.fields import Fields
from rollouts.gateway.replies import CallDelta, Finished, ReasoningDelta, Reply, TextDelta
from rollouts.gateway.requests import ModelRequest

_KNOWN = {
    *("model", "prompt", "max_tokens", "n", "stream", "stream_options", "logprobs"),
    *("temperature", "top_p", "top_k", "stop", "seed"),
}
_HARMLESS: dict[str, Any] = {
    "user": ...,
    "echo": False,
    "best_of": 1,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
}


class OpenAICompletions:
    """POST /v1/completions."""

    name = "openai-completions"

    def read(self, body: Fields, *, model: str, remembered: Remembered) -> ModelRequest:
        body.only(_KNOWN, _HARMLESS)
        body.integer("logprobs", 0, 1)
        options = body.object("stream_options")
        return ModelRequest(
            dialect=self.name,
            model=body.model(),
            prompt=_read_prompt(body),
            wishes=read_wishes(body, "max_tokens"),
            n=body.integer("n", 1, MAX_CHOICES) or 1,
            stream=body.flag("stream"),
            include_usage=options is not None and options.flag("include_usage"),
            logprobs="logprobs" in body,
        )

    def answer(self, request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [
            _choice(index, reply.told.content, reply.ending, _logprobs(reply) if request.logprobs else None)
            for index, reply in enumerate(replies)
        ]
        return _head(request) | {"choices": choices, "usage": usage(replies)}

    async def events(self, request: ModelRequest, parts: AsyncIterator[Part]) -> AsyncIterator[bytes]:
        finished: list[Reply] = []
        async for index, event in parts:
            match event:
                case TextDelta(text) | ReasoningDelta(text):
                    yield sse(_head(request) | {"choices": [_choice(index, text)]})
                case CallDelta():
                    raise AssertionError("a request without tools gets no calls")
                case Finished(reply):
                    finished.append(reply)
                    logprobs = _logprobs(reply) if request.logprobs else None
                    yield sse(_head(request) | {"choices": [_choice(index, "", reply.ending, logprobs)]})
        if request.include_usage:
            yield sse(_head(request) | {"choices": [], "usage": usage(finished)})
        yield b"data: [DONE]\n\n"

    def error(self, error: CallRefused) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: CallRefused) -> bytes:
        return sse(error_body(error))


def _read_prompt(body: Fields) -> str | tuple[int, ...]:
    prompt = body.raw("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return tuple(prompt)
    raise body.refuse("prompt", "must be one prompt: a string or a list of token ids, not empty")


def _head(request: ModelRequest) -> dict[str, Any]:
    return {"id": f"cmpl-{request.id}", "object": "text_completion", "created": int(time.time()), "model": request.model}


def _choice(index: int, text: str, ending: str | None = None, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ending}


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    if reply.record.logprobs is None:
        return None
    tokens = [f"token_id:{token}" for token in reply.record.sampled_ids]
    return {"tokens": tokens, "token_logprobs": reply.record.logprobs, "top_logprobs": None, "text_offset": []}
