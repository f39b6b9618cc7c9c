"""Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rollouts.gateway.dialects.base import Part, Remembered, sse
from rollouts.gateway.errors import CallRefused, Kind
from rollouts.gateway.fields import Fields
from rollouts.gateway.pictures import Part as MessagePart
from rollouts.gateway.pictures import PictureReader, misplaced, text_of, text_part, with_parts
from rollouts.gateway.replies import CallDelta, Finished, ReasoningDelta, Reply, TextDelta
from rollouts.gateway.requests import FunctionTool, ModelRequest, Wishes
from rollouts.llm.types import ChatMessage

_KNOWN = {
    *("model", "messages", "system", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k"),
    *("tools", "tool_choice", "stream"),
}
_HARMLESS: dict[str, Any] = {
    **dict.fromkeys(("metadata", "service_tier", "cache_control", "inference_geo", "speed"), ...),
    **dict.fromkeys(("thinking", "context_management"), ...),
    "mcp_servers": [],
}
_ERRORS = {
    Kind.INVALID: "invalid_request_error",
    Kind.UNAUTHENTICATED: "authentication_error",
    Kind.CLOSED: "permission_error",
    Kind.NOT_FOUND: "not_found_error",
    Kind.WRONG_METHOD: "invalid_request_error",
    Kind.TOO_SLOW: "timeout_error",
    Kind.TOO_LARGE: "request_too_large",
    Kind.TOO_MANY: "rate_limit_error",
    Kind.NO_SERVER: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class AnthropicMessages:
    """POST /v1/messages."""

    name = "anthropic"

    def read(self, body: Fields, *, model: str, remembered: Remembered) -> ModelRequest:
        body.only(_KNOWN, _HARMLESS)
        if "max_tokens" not in body:
            raise body.refuse("max_tokens", "is required")
        return self._read(body)

    def read_to_count(self, body: Fields, *, model: str) -> ModelRequest:
        body.only(_KNOWN, _HARMLESS)
        return self._read(body)

    def _read(self, body: Fields) -> ModelRequest:
        pictures = PictureReader()
        messages = [message for fields in body.objects("messages") for message in _read_message(fields, pictures)]
        if not messages:
            raise body.refuse("messages", "must be a list of at least one message")
        if system := text_of(_read_parts(body, "system", None)):
            messages.insert(0, {"role": "system", "content": system})
        choice = body.object("tool_choice")
        return ModelRequest(
            dialect=self.name,
            model=body.model(),
            messages=tuple(messages),
            pictures_at=pictures.first,
            tools=tuple(_read_tool(tool) for tool in body.objects("tools")),
            may_call=_read_may_call(choice),
            parallel_calls=choice is None or not choice.flag("disable_parallel_tool_use"),
            wishes=Wishes(
                max_tokens=body.integer("max_tokens", 1, 2**31),
                temperature=body.number("temperature", 0, 2),
                top_p=body.number("top_p", 0, 1),
                top_k=body.integer("top_k", -1, 2**31),
                stop=body.texts("stop_sequences"),
            ),
            stream=body.flag("stream"),
        )

    def answer(self, request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
        reply = replies[0]
        blocks: list[dict[str, Any]] = []
        if reply.told.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.told.reasoning, "signature": ""})
        if reply.told.content:
            blocks.append({"type": "text", "text": reply.told.content})
        for call in reply.told.calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
        return _head(request) | {"content": blocks, **_stop(reply), "usage": _usage(reply)}

    async def events(self, request: ModelRequest, parts: AsyncIterator[Part]) -> AsyncIterator[bytes]:
        blocks = _Blocks()
        begun = False
        async for _, event in parts:
            if not begun:
                begun = True
                message = _head(request) | {"content": [], "stop_reason": None, "stop_sequence": None}
                message["usage"] = {"input_tokens": 0, "output_tokens": 0}
                yield _event("message_start", {"message": message})
            match event:
                case TextDelta(text):
                    yield blocks.more({"type": "text", "text": ""}, {"type": "text_delta", "text": text})
                case ReasoningDelta(text):
                    thought = {"type": "thinking", "thinking": "", "signature": ""}
                    yield blocks.more(thought, {"type": "thinking_delta", "thinking": text})
                case CallDelta(_, call):
                    block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                    delta = {"type": "input_json_delta", "partial_json": json.dumps(call.arguments, ensure_ascii=False)}
                    yield blocks.close() + blocks.more(block, delta)
                case Finished(reply):
                    yield blocks.close() + _event("message_delta", {"delta": _stop(reply), "usage": _usage(reply)})
        yield _event("message_stop", {})

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def error(self, error: CallRefused) -> dict[str, Any]:
        message = str(error)
        if error.overflow:
            # In these words, which agents look for.
            message = f"prompt is too long: {error.overflow.prompt} tokens > {error.overflow.limit} maximum"
        return {"type": "error", "error": {"type": _ERRORS.get(error.kind, "api_error"), "message": message}}

    def error_event(self, error: CallRefused) -> bytes:
        return sse(self.error(error), "error")


class _Blocks:
    """The content blocks of a streamed message: one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""

    def more(self, block: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        """More of the open block, after opening `block` when none of its type is."""
        begin = b""
        if self._open != block["type"]:
            begin = self.close()
            self._index += 1
            self._open = block["type"]
            begin += _event("content_block_start", {"index": self._index, "content_block": block})
        return begin + _event("content_block_delta", {"index": self._index, "delta": delta})

    def close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", {"index": self._index})


def _event(kind: str, data: Mapping[str, Any]) -> bytes:
    return sse({"type": kind, **data}, kind)


def _read_message(fields: Fields, pictures: PictureReader) -> list[ChatMessage]:
    """One message of theirs: tool results are messages of their own here, and come first."""
    role = fields.text("role")
    if role not in ("user", "assistant"):
        raise fields.refuse("role", "must be user or assistant")
    if not isinstance(fields.raw("content"), list):
        return [{"role": role, "content": fields.text("content")}]  # type: ignore[typeddict-item]
    parts: list[MessagePart] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[ChatMessage] = []
    for block in fields.objects("content"):
        match block.text("type"):
            case "text":
                parts.append(text_part(block.text("text")))
            case "image" if role == "user":
                parts.append(_read_picture(block, pictures))
            case "tool_result" if role == "user":
                result: ChatMessage = {"role": "tool", "content": "", "tool_call_id": block.text("tool_use_id")}
                results.append(with_parts(result, _read_parts(block, "content", pictures)))
            case "tool_use" if role == "assistant":
                arguments = block.object("input")
                function = {"name": block.text("name"), "arguments": block.raw("input") if arguments else {}}
                calls.append({"id": block.text("id"), "type": "function", "function": function})
            case "thinking" if role == "assistant":
                thoughts.append(block.text("thinking"))
            case "redacted_thinking" if role == "assistant":
                pass
            case kind:
                raise block.refuse("type", f"{kind!r} is not supported in a message of the {role}")
    if role == "user":
        return [*results, with_parts({"role": "user", "content": ""}, parts)] if parts or not results else results
    message: ChatMessage = {"role": "assistant", "content": text_of(parts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _read_parts(fields: Fields, name: str, pictures: PictureReader | None) -> list[MessagePart]:
    """A string, or a list of blocks of text and, where there may be `pictures`, of pictures."""
    if not isinstance(fields.raw(name), list):
        return [text_part(fields.text(name))]
    parts = []
    for block in fields.objects(name):
        kind = block.text("type")
        if kind == "text":
            parts.append(text_part(block.text("text")))
        elif kind != "image":
            raise block.refuse("type", f"{kind!r} is not supported; send text or pictures")
        elif pictures is None:
            raise misplaced(block)
        else:
            parts.append(_read_picture(block, pictures))
    return parts


def _read_picture(block: Fields, pictures: PictureReader) -> MessagePart:
    source = block.required("source")
    if source.text("type") != "base64":
        raise source.refuse("type", "nothing is fetched, nor are files kept here: send the picture itself, as base64")
    return pictures.from_base64(source, "data", "media_type")


def _read_tool(fields: Fields) -> FunctionTool:
    if fields.text("type", "custom") != "custom":
        raise fields.refuse("type", "only tools of the agent are supported")
    name, schema = fields.text("name"), fields.object("input_schema")
    if not name or schema is None:
        raise fields.refuse("input_schema" if name else "name", "is required")
    return FunctionTool(name, fields.text("description"), fields.raw("input_schema"))


def _read_may_call(choice: Fields | None) -> bool:
    kind = choice.text("type") if choice else "auto"
    if choice and kind not in ("auto", "none"):
        raise choice.refuse("type", "only auto and none are supported")
    return kind == "auto"


def _head(request: ModelRequest) -> dict[str, Any]:
    return {"id": f"msg_{request.id}", "type": "message", "role": "assistant", "model": request.model}


def _stop(reply: Reply) -> dict[str, Any]:
    reason = "stop_sequence" if reply.told.stop and reply.ending == "stop" else _STOP_REASONS[reply.ending]
    return {"stop_reason": reason, "stop_sequence": reply.told.stop}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.record.prompt_tokens,
        "output_tokens": reply.sampled_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
