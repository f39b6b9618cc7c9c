"""Google's generateContent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rollouts.gateway.dialects.base import Part, Remembered, sse
from rollouts.gateway.errors import CallRefused, Kind
from rollouts.gateway.fields import Fields
from rollouts.gateway.pictures import Part as MessagePart
from rollouts.gateway.pictures import PictureReader, misplaced, text_part, with_parts
from rollouts.gateway.replies import CallDelta, CallOut, Event, Finished, ReasoningDelta, Reply, TextDelta
from rollouts.gateway.requests import FunctionTool, ModelRequest, Wishes
from rollouts.llm.types import ChatMessage

_KNOWN = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"}
_HARMLESS: dict[str, Any] = {"safetySettings": ..., "labels": ..., "model": ..., "store": ..., "serviceTier": ...}
_KNOWN_SAMPLING = {"temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "candidateCount", "seed"}
_HARMLESS_SAMPLING: dict[str, Any] = {
    "thinkingConfig": ...,
    "responseMimeType": "text/plain",
    "responseModalities": ["TEXT"],
    "presencePenalty": 0,
    "frequencyPenalty": 0,
    "responseLogprobs": False,
}
_STATUSES = {
    Kind.INVALID: "INVALID_ARGUMENT",
    Kind.UNAUTHENTICATED: "UNAUTHENTICATED",
    Kind.CLOSED: "PERMISSION_DENIED",
    Kind.NOT_FOUND: "NOT_FOUND",
    Kind.WRONG_METHOD: "UNIMPLEMENTED",
    Kind.TOO_SLOW: "DEADLINE_EXCEEDED",
    Kind.TOO_LARGE: "INVALID_ARGUMENT",
    Kind.TOO_MANY: "RESOURCE_EXHAUSTED",
    Kind.NO_SERVER: "UNAVAILABLE",
}
_FINISH_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_TEXT_RESULTS = ("output", "result", "error")
_INLINE = ("inlineData", "inline_data")


class GoogleGenerate:
    """POST /v1beta/models/{model}:generateContent, and :streamGenerateContent with `stream`."""

    name = "google"

    def __init__(self, *, stream: bool = False) -> None:
        self._stream = stream

    def read(self, body: Fields, *, model: str, remembered: Remembered) -> ModelRequest:
        body.only(_KNOWN, _HARMLESS)
        pictures = PictureReader()
        messages = _read_contents(body.objects("contents"), pictures)
        if not messages:
            raise body.refuse("contents", "must be a list of at least one content")
        if instruction := body.object("systemInstruction"):
            messages.insert(0, {"role": "system", "content": _read_texts(instruction)})
        sampling = body.object("generationConfig") or Fields({}, "generationConfig")
        sampling.only(_KNOWN_SAMPLING, _HARMLESS_SAMPLING)
        return ModelRequest(
            dialect=self.name,
            model=model,
            messages=tuple(messages),
            pictures_at=pictures.first,
            tools=tuple(function for tool in body.objects("tools") for function in _read_tools(tool)),
            may_call=_read_may_call(body.object("toolConfig")),
            wishes=Wishes(
                max_tokens=sampling.integer("maxOutputTokens", 1, 2**31),
                temperature=sampling.number("temperature", 0, 2),
                top_p=sampling.number("topP", 0, 1),
                top_k=sampling.integer("topK", 1, 2**31),
                stop=sampling.texts("stopSequences"),
                seed=sampling.integer("seed", -(2**63), 2**63 - 1),
            ),
            n=sampling.integer("candidateCount", 1, 8) or 1,
            stream=self._stream,
        )

    def read_to_count(self, body: Fields, *, model: str) -> ModelRequest:
        return self.read(body.object("generateContentRequest") or body, model=model, remembered={})

    def answer(self, request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
        candidates = []
        for index, reply in enumerate(replies):
            told = reply.told
            parts = [{"text": told.reasoning, "thought": True}] if told.reasoning else []
            parts += [{"text": told.content}] if told.content else []
            parts += [_call(call) for call in told.calls]
            candidates.append(_candidate(index, parts, reply))
        return _head(request) | {"candidates": candidates, "usageMetadata": _usage(replies)}

    async def events(self, request: ModelRequest, parts: AsyncIterator[Part]) -> AsyncIterator[bytes]:
        finished: list[Reply] = []
        async for index, event in parts:
            if isinstance(event, Finished):
                finished.append(event.reply)
                ending = {"candidates": [_candidate(index, [], event.reply)], "usageMetadata": _usage(finished)}
                yield sse(_head(request) | ending)
            else:
                yield sse(_head(request) | {"candidates": [_candidate(index, [_part(event)], None)]})

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}

    def error(self, error: CallRefused) -> dict[str, Any]:
        message = str(error)
        if error.overflow:
            prompt, limit = error.overflow
            message = f"The input token count ({prompt}) exceeds the maximum number of tokens allowed ({limit})."
        return {"error": {"code": error.kind.value, "message": message, "status": _STATUSES.get(error.kind, "INTERNAL")}}

    def error_event(self, error: CallRefused) -> bytes:
        return sse(self.error(error))


def _read_contents(contents: Sequence[Fields], pictures: PictureReader) -> list[ChatMessage]:
    """Calls have no ids in most requests: a result then belongs to the first call of its name that has none yet."""
    messages: list[ChatMessage] = []
    open_calls: list[tuple[str, str]] = []  # id and name
    for number, content in enumerate(contents):
        role = content.text("role", "user")
        if role == "model":
            message = _read_reply(content, number)
            open_calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
            messages.append(message)
        elif role in ("user", "function"):
            messages += _read_user(content, open_calls, pictures)
        else:
            raise content.refuse("role", "must be user or model")
    return messages


def _read_reply(content: Fields, number: int) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content.objects("parts"):
        if call := part.object("functionCall"):
            call.object("args")
            function = {"name": call.text("name"), "arguments": call.raw("args") or {}}
            calls.append({"id": call.text("id") or f"c{number:05}{len(calls):03}", "type": "function", "function": function})
        else:
            (thoughts if part.flag("thought") else texts).append(_text_of(part))
    message: ChatMessage = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_user(content: Fields, open_calls: list[tuple[str, str]], pictures: PictureReader) -> list[ChatMessage]:
    parts: list[MessagePart] = []
    results: list[ChatMessage] = []
    for part in content.objects("parts"):
        if result := part.object("functionResponse"):
            name, given = result.text("name"), result.text("id")
            asked = next((call for call in open_calls if call[0] == given or (not given and call[1] == name)), (given, name))
            if asked in open_calls:
                open_calls.remove(asked)
            message: ChatMessage = {"role": "tool", "content": "", "name": name, "tool_call_id": asked[0]}
            text, shown = _read_result(result), [_read_picture(one, pictures) for one in result.objects("parts")]
            results.append(with_parts(message, [*([text_part(text)] if text or not shown else []), *shown]))
        elif any(name in part for name in _INLINE):
            parts.append(_read_picture(part, pictures))
        else:
            parts.append(text_part(_text_of(part)))
    return [*results, with_parts({"role": "user", "content": ""}, parts)] if parts or not results else results


def _read_result(fields: Fields) -> str:
    response = fields.object("response")
    if response is None:
        return ""
    value = fields.raw("response")
    if len(value) == 1 and isinstance(text := next(iter(value.items())), tuple) and text[0] in _TEXT_RESULTS:
        return text[1] if isinstance(text[1], str) else json.dumps(text[1], ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _read_picture(part: Fields, pictures: PictureReader) -> MessagePart:
    _refuse_files(part)
    part.only(_INLINE, {"mediaResolution": ...})
    data = part.required(next((name for name in _INLINE if name in part), "inlineData"))
    return pictures.from_base64(data, "data", "mime_type" if "mime_type" in data else "mimeType")


def _refuse_files(part: Fields) -> None:
    for name in ("fileData", "file_data"):
        if name in part:
            raise part.refuse(name, "files are not kept here: send the picture itself, as inlineData")


def _text_of(part: Fields) -> str:
    _refuse_files(part)
    for name in _INLINE:
        if name in part:
            raise misplaced(part, name)
    part.only({"text", "thought"}, {"thoughtSignature": ...})
    return part.text("text")


def _read_texts(content: Fields) -> str:
    return "\n".join(_text_of(part) for part in content.objects("parts"))


def _read_tools(fields: Fields) -> list[FunctionTool]:
    fields.only({"functionDeclarations"}, {})
    functions = []
    for declaration in fields.objects("functionDeclarations"):
        if not declaration.text("name"):
            raise declaration.refuse("name", "is required")
        field = "parametersJsonSchema" if "parametersJsonSchema" in declaration else "parameters"
        declaration.object(field)
        schema = _json_schema(declaration.raw(field) or {"type": "object", "properties": {}})
        functions.append(FunctionTool(declaration.text("name"), declaration.text("description"), schema))
    return functions


def _json_schema(value: Any) -> Any:
    """Google writes the types of JSON Schema in capitals."""
    if isinstance(value, list):
        return [_json_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {k: v.lower() if k == "type" and isinstance(v, str) else _json_schema(v) for k, v in value.items()}


def _read_may_call(config: Fields | None) -> bool:
    calling = config.object("functionCallingConfig") if config else None
    mode = calling.text("mode", "AUTO") if calling else "AUTO"
    if calling and mode not in ("AUTO", "NONE", "MODE_UNSPECIFIED"):
        raise calling.refuse("mode", "only AUTO and NONE are supported")
    return mode != "NONE"


def _head(request: ModelRequest) -> dict[str, Any]:
    return {"modelVersion": request.model, "responseId": request.id}


def _candidate(index: int, parts: Sequence[Mapping[str, Any]], reply: Reply | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": index, "content": {"role": "model", "parts": parts}}
    if reply is not None:
        candidate["finishReason"] = _FINISH_REASONS[reply.ending]
    return candidate


def _part(event: Event) -> dict[str, Any]:
    match event:
        case TextDelta(text):
            return {"text": text}
        case ReasoningDelta(text):
            return {"text": text, "thought": True}
        case CallDelta(_, call):
            return _call(call)
    raise AssertionError("the end is written by the caller")


def _call(call: CallOut) -> dict[str, Any]:
    return {"functionCall": {"id": call.id, "name": call.name, "args": dict(call.arguments)}}


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    prompt = replies[0].record.prompt_tokens
    sampled = sum(reply.sampled_tokens for reply in replies)
    return {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}
