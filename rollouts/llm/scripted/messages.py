"""Messages as requests carry them, and as a template takes them: tools and tool calls are text there, as in Hermes' format."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from rollouts.llm.scripted.errors import BadRequest
from rollouts.llm.scripted.tokenizer import PICTURE
from rollouts.llm.types import ChatMessage

_TOOLS = "# Tools\n\nYou may call these functions:\n<tools>\n{}\n</tools>\n\nCall one with <tool_call>{{...}}</tool_call>."
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Chat(NamedTuple):
    """Messages in which `<picture>` stands for each of the pictures, and the URLs of these."""

    messages: list[ChatMessage]
    pictures: list[str]


def read_messages(body: dict[str, Any]) -> Chat:
    """The messages of a request, with its `tools` in the system message."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise BadRequest("messages must be a list of objects with a role", param="messages")
    if not messages:
        raise BadRequest("Cannot apply chat template to an empty conversation. Provide at least one message.")
    pictures: list[str] = []
    plain = [ChatMessage(role=message["role"], content=_content(message, pictures)) for message in messages]
    return Chat(_with_tools(plain, body.get("tools") or ()), pictures)


def parse_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What a tool parser makes of a reply: the rest of the text, and the calls as OpenAI's API writes them."""
    calls = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)
        except ValueError:
            return text, []
        function = {"name": str(call.get("name")), "arguments": json.dumps(call.get("arguments") or {})}
        calls.append({"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function", "function": function})
    return (_CALL.sub("", text).strip(), calls) if calls else (text, [])


def _content(message: dict[str, Any], pictures: list[str]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, pictures) for part in content if isinstance(part, dict))
    text = str(content or "")
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        text = f"<think>\n{reasoning}\n</think>\n\n{text}"
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        text += f"{chr(10) if text else ''}<tool_call>\n"
        text += f'{{"name": {json.dumps(function["name"])}, "arguments": {written}}}\n</tool_call>'
    return text


def _part(part: dict[str, Any], pictures: list[str]) -> str:
    """Its text; a picture is noted in `pictures`."""
    if part.get("type") != "image_url":
        return str(part.get("text", ""))
    source = part.get("image_url")
    pictures.append(str(source.get("url") if isinstance(source, dict) else source))
    return PICTURE


def _with_tools(messages: list[ChatMessage], tools: Sequence[Any]) -> list[ChatMessage]:
    if not tools:
        return messages
    section = _TOOLS.format("\n".join(json.dumps(tool) for tool in tools))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": section}, *messages]
    return [{"role": "system", "content": f"{messages[0]['content']}\n\n{section}"}, *messages[1:]]
