"""OpenAI's Responses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rollouts.gateway.dialects.base import Part, Remembered, sse
from rollouts.gateway.dialects.openai_common import call_item, error_body, read_arguments, read_function, read_may_call
from rollouts.gateway.dialects.responses_stream import ResponseStream
from rollouts.gateway.errors import CallRefused
from rollouts.gateway.fields import Fields
from rollouts.gateway.pictures import Part as MessagePart
from rollouts.gateway.pictures import PictureReader, misplaced, text_of, text_part, with_parts
from rollouts.gateway.replies import Reply, Told
from rollouts.gateway.requests import FunctionTool, ModelRequest, Wishes
from rollouts.llm.types import ChatMessage

_KNOWN = {
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens"),
    *("temperature", "top_p", "stream", "previous_response_id"),
}
_HARMLESS: dict[str, Any] = {
    **dict.fromkeys(("metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key"), ...),
    **dict.fromkeys(("prompt_cache_retention", "reasoning", "include", "stream_options"), ...),
    "background": False,
    "truncation": "disabled",
    "top_logprobs": 0,
    "text": {"format": {"type": "text"}},
}
_TEXT_PARTS = {"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"}


class OpenAIResponses:
    """POST /v1/responses. `previous_response_id` may name any response of the session, whatever `store` said."""

    name = "openai-responses"

    def read(self, body: Fields, *, model: str, remembered: Remembered) -> ModelRequest:
        body.only(_KNOWN, _HARMLESS)
        messages = list(_previous(body, remembered))
        pictures = PictureReader()
        given = body.raw("input")
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        else:
            messages += _read_items(body.objects("input"), pictures)
        if not messages:
            raise body.refuse("input", "must be a string or a list of at least one item")
        instructions = body.text("instructions")
        system: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
        return ModelRequest(
            dialect=self.name,
            model=body.model(),
            messages=(*system, *messages),
            pictures_at=pictures.first,
            remember=tuple(messages),
            tools=tuple(_read_tool(tool) for tool in body.objects("tools")),
            may_call=read_may_call(body),
            parallel_calls=body.flag("parallel_tool_calls", True),
            wishes=Wishes(
                max_tokens=body.integer("max_output_tokens", 1, 2**31),
                temperature=body.number("temperature", 0, 2),
                top_p=body.number("top_p", 0, 1),
            ),
            stream=body.flag("stream"),
        )

    def answer(self, request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
        return _response(request, replies[0])

    async def events(self, request: ModelRequest, parts: AsyncIterator[Part]) -> AsyncIterator[bytes]:
        stream = ResponseStream(_response(request, None))
        async for _, event in parts:
            for written in stream.write(event, lambda reply: _response(request, reply)):
                yield written

    def error(self, error: CallRefused) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: CallRefused) -> bytes:
        detail = error_body(error)["error"]
        return sse({"type": "error", "sequence_number": 0, **detail}, "error")


def _previous(body: Fields, remembered: Remembered) -> Sequence[ChatMessage]:
    name = body.text("previous_response_id")
    if not name:
        return ()
    if name.removeprefix("resp_") not in remembered:
        raise body.refuse("previous_response_id", "this session has no such response")
    return remembered[name.removeprefix("resp_")]


def _read_items(items: Sequence[Fields], pictures: PictureReader) -> list[ChatMessage]:
    """What a model says in one go is several items: text, reasoning and calls in a row are one message here."""
    messages: list[ChatMessage] = []
    reply: ChatMessage | None = None
    for item in items:
        kind = item.text("type", "message")
        role = item.text("role") if kind == "message" else ""
        if kind in ("function_call", "reasoning") or role == "assistant":
            if reply is None:
                reply = {"role": "assistant", "content": ""}
                messages.append(reply)
            _add_to_reply(reply, item, kind)
            continue
        reply = None
        if kind == "function_call_output":
            result: ChatMessage = {"role": "tool", "content": "", "tool_call_id": item.text("call_id")}
            messages.append(with_parts(result, _read_parts(item, "output", pictures)))
        elif kind == "message" and role in ("system", "developer"):
            messages.append({"role": "system", "content": _read_text(item, "content")})
        elif kind == "message" and role == "user":
            messages.append(with_parts({"role": "user", "content": ""}, _read_parts(item, "content", pictures)))
        elif kind == "message":
            raise item.refuse("role", "must be system, developer, user or assistant")
        else:
            raise item.refuse("type", f"{kind!r} is not supported")
    return messages


def _add_to_reply(reply: ChatMessage, item: Fields, kind: str) -> None:
    if kind == "function_call":
        function = {"name": item.text("name"), "arguments": read_arguments(item.text("arguments", "{}"))}
        call = {"id": item.text("call_id"), "type": "function", "function": function}
        reply["tool_calls"] = [*reply.get("tool_calls", ()), call]
    elif kind == "reasoning":
        if text := _read_text(item, "content") or _read_text(item, "summary"):
            reply["reasoning_content"] = text
    else:
        reply["content"] = "\n".join(filter(None, [reply["content"], _read_text(item, "content")]))


def _read_text(fields: Fields, name: str) -> str:
    return text_of(_read_parts(fields, name, None))


def _read_parts(fields: Fields, name: str, pictures: PictureReader | None) -> list[MessagePart]:
    """A string, or a list of texts and, where there may be `pictures`, of pictures."""
    if not isinstance(fields.raw(name), list):
        return [text_part(fields.text(name))]
    parts = []
    for part in fields.objects(name):
        kind = part.text("type")
        if kind in _TEXT_PARTS:
            parts.append(text_part(part.text("refusal" if kind == "refusal" else "text")))
        elif kind != "input_image":
            raise part.refuse("type", f"{kind!r} is not supported; send text or pictures")
        elif pictures is None:
            raise misplaced(part)
        elif "file_id" in part:
            raise part.refuse("file_id", "files are not kept here: send the picture itself, as a data: URL in image_url")
        else:
            parts.append(pictures.from_url(part, "image_url"))
    return parts


def _read_tool(fields: Fields) -> FunctionTool:
    if fields.text("type") != "function":
        raise fields.refuse("type", "only functions are supported")
    return read_function(fields)


def _response(request: ModelRequest, reply: Reply | None) -> dict[str, Any]:
    """The response object; without a reply, as it is when it begins."""
    incomplete = None
    if reply is not None and reply.ending in ("length", "content_filter"):
        incomplete = {"reason": "max_output_tokens" if reply.ending == "length" else "content_filter"}
    status = "in_progress" if reply is None else "incomplete" if incomplete else "completed"
    return {
        "id": f"resp_{request.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": incomplete,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": _output(request, reply.told) if reply else [],
        "parallel_tool_calls": request.parallel_calls,
        "temperature": request.wishes.temperature,
        "top_p": request.wishes.top_p,
        "tool_choice": "auto" if request.may_call else "none",
        "tools": [{"type": "function", **tool.described()["function"], "strict": False} for tool in request.tools],
        "usage": _usage(reply) if reply else None,
    }


def _output(request: ModelRequest, told: Told) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if told.reasoning:
        thought = {"id": f"rs_{request.id}", "type": "reasoning", "status": "completed", "summary": []}
        items.append({**thought, "content": [{"type": "reasoning_text", "text": told.reasoning}]})
    if told.content:
        said = {"id": f"msg_{request.id}", "type": "message", "status": "completed", "role": "assistant"}
        text = {"type": "output_text", "text": told.content, "annotations": [], "logprobs": []}
        items.append({**said, "content": [text]})
    return items + [call_item(call) for call in told.calls]


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, sampled = reply.record.prompt_tokens, reply.sampled_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
