"""OpenAI's Chat Completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rollouts.gateway.dialects.base import Part, Remembered, sse
from rollouts.gateway.dialects.openai_common import (
    error_body,
    read_arguments,
    read_function,
    read_may_call,
    usage,
    write_arguments,
)
from rollouts.gateway.errors import CallRefused
from rollouts.gateway.fields import Fields
from rollouts.gateway.pictures import Part as MessagePart
from rollouts.gateway.pictures import PictureReader, misplaced, text_part, with_parts
from rollouts.gateway.replies import CallDelta, CallOut, Finished, ReasoningDelta, Reply, TextDelta
from rollouts.gateway.requests import FunctionTool, ModelRequest, Wishes
from rollouts.llm.types import ChatMessage

MAX_CHOICES = 64

_KNOWN = {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stream", "stream_options", "logprobs"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop", "seed"),
}
_HARMLESS: dict[str, Any] = {
    **dict.fromkeys(("metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key"), ...),
    **dict.fromkeys(("prompt_cache_retention", "prediction", "reasoning_effort", "verbosity"), ...),
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "function_call": "none",
    "functions": [],
}


class OpenAIChat:
    """POST /v1/chat/completions."""

    name = "openai-chat"

    def read(self, body: Fields, *, model: str, remembered: Remembered) -> ModelRequest:
        body.only(_KNOWN, _HARMLESS)
        pictures = PictureReader()
        messages = tuple(_read_message(message, pictures) for message in body.objects("messages"))
        if not messages:
            raise body.refuse("messages", "must be a list of at least one message")
        options = body.object("stream_options")
        return ModelRequest(
            dialect=self.name,
            model=body.model(),
            messages=messages,
            pictures_at=pictures.first,
            tools=tuple(_read_tool(tool) for tool in body.objects("tools")),
            may_call=read_may_call(body),
            parallel_calls=body.flag("parallel_tool_calls", True),
            wishes=read_wishes(body, "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"),
            n=body.integer("n", 1, MAX_CHOICES) or 1,
            stream=body.flag("stream"),
            include_usage=options is not None and options.flag("include_usage"),
            logprobs=body.flag("logprobs"),
        )

    def answer(self, request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": _logprobs(reply) if request.logprobs else None,
                "finish_reason": reply.ending,
            }
            for index, reply in enumerate(replies)
        ]
        head = _head(request, "chat.completion")
        return head | {"choices": choices, "usage": usage(replies)}

    async def events(self, request: ModelRequest, parts: AsyncIterator[Part]) -> AsyncIterator[bytes]:
        head = _head(request, "chat.completion.chunk")
        finished: list[Reply] = []
        begun: set[int] = set()
        async for index, event in parts:
            if index not in begun:
                begun.add(index)
                yield _chunk(head, index, {"role": "assistant", "content": ""})
            match event:
                case TextDelta(text):
                    yield _chunk(head, index, {"content": text})
                case ReasoningDelta(text):
                    yield _chunk(head, index, {"reasoning_content": text})
                case CallDelta(number, call):
                    yield _chunk(head, index, {"tool_calls": [{"index": number, **_call(call)}]})
                case Finished(reply):
                    finished.append(reply)
                    logprobs = _logprobs(reply) if request.logprobs else None
                    yield _chunk(head, index, {}, finish_reason=reply.ending, logprobs=logprobs)
        if request.include_usage:
            yield sse(head | {"choices": [], "usage": usage(finished)})
        yield b"data: [DONE]\n\n"

    def error(self, error: CallRefused) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: CallRefused) -> bytes:
        return sse(error_body(error))


def read_wishes(body: Fields, max_tokens: str) -> Wishes:
    """The sampling settings of a request; the limit of tokens is in the field `max_tokens`."""
    return Wishes(
        max_tokens=body.integer(max_tokens, 1, 2**31),
        temperature=body.number("temperature", 0, 2),
        top_p=body.number("top_p", 0, 1),
        top_k=body.integer("top_k", -1, 2**31),
        stop=body.texts("stop"),
        seed=body.integer("seed", -(2**63), 2**63 - 1),
    )


def _read_message(fields: Fields, pictures: PictureReader) -> ChatMessage:
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise fields.refuse("role", "must be system, developer, user, assistant or tool")
    message: ChatMessage = {"role": "system" if role == "developer" else role, "content": ""}  # type: ignore[typeddict-item]
    with_parts(message, _read_content(fields, pictures, may_show=role in ("user", "tool")))
    if reasoning := fields.text("reasoning_content") or fields.text("reasoning"):
        message["reasoning_content"] = reasoning
    if name := fields.text("name"):
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id")
    if calls := [_read_call(call) for call in fields.objects("tool_calls")]:
        message["tool_calls"] = calls
    return message


def _read_content(fields: Fields, pictures: PictureReader, *, may_show: bool) -> list[MessagePart]:
    if not isinstance(fields.raw("content"), list):
        return [text_part(fields.text("content"))]
    parts = []
    for part in fields.objects("content"):
        match part.text("type"):
            case "text" | "refusal" as kind:
                parts.append(text_part(part.text(kind)))
            case "image_url" if not may_show:
                raise misplaced(part)
            case "image_url":
                parts.append(pictures.from_url(part.required("image_url"), "url"))
            case kind:
                raise part.refuse("type", f"{kind!r} is not supported; send text or pictures")
    return parts


def _read_call(fields: Fields) -> dict[str, Any]:
    function = fields.required("function")
    arguments = read_arguments(function.text("arguments", "{}"))
    return {"id": fields.text("id"), "type": "function", "function": {"name": function.text("name"), "arguments": arguments}}


def _read_tool(fields: Fields) -> FunctionTool:
    if fields.text("type") != "function":
        raise fields.refuse("type", "only functions are supported")
    function = fields.required("function")
    return read_function(function)


def _head(request: ModelRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{request.id}", "object": kind, "created": int(time.time()), "model": request.model}


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.told.content, "refusal": None}
    if reply.told.reasoning:
        message["reasoning_content"] = reply.told.reasoning
    if reply.told.calls:
        message["content"] = reply.told.content or None
        message["tool_calls"] = [_call(call) for call in reply.told.calls]
    return message


def _call(call: CallOut) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": write_arguments(call)}}


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    """By id, because the text of a single token is not always text."""
    if reply.record.logprobs is None:
        return None
    pairs = zip(reply.record.sampled_ids, reply.record.logprobs, strict=True)
    entries: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []} for token, value in pairs
    ]
    return {"content": entries, "refusal": None}


def _chunk(head: Mapping[str, Any], index: int, delta: Mapping[str, Any], **ending: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **ending}
    return sse({**head, "choices": [choice]})
