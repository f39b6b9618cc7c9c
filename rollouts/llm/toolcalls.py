"""Tool calls in sampled text: Hermes `<tool_call>` JSON, or fenced code for tools that take code.

Parsing never raises. What is wrong with a reply comes back as sentences for the model to read. The rules:

* Reasoning (`<think>…</think>`, also unclosed, also with the opening tag in the prompt) is neither searched nor content.
* If any `<tool_call>` is there, fences are content. Otherwise a fence marked python, bash or sh (for bash) calls the tool of
  that name, when it is offered and has a `code_argument`.
* An unclosed tag or fence is an error, not a call: the text may have been cut in the middle of the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollouts.llm.turns import REASONING_END
from rollouts.llm.types import ToolCallRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_FENCE = re.compile(r"^```(python|bash|sh)[ \t]*\n(.*?)(^```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_FENCE_TOOL = {"python": "python", "bash": "bash", "sh": "bash"}
_SHAPE = f'Write {OPEN}{{"name": "…", "arguments": {{…}}}}{CLOSE} with valid JSON inside.'
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolSignature(Protocol):
    """What parsing needs to know of a tool."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema of the arguments object; `properties`, their `type`, and `required` are enforced."""
        ...

    @property
    def code_argument(self) -> str | None:
        """The one argument that a fenced code block fills; None when fences do not call this tool."""
        ...


@dataclass
class ParsedReply:
    """A reply taken apart. `content` is what it says outside calls and reasoning; `errors` are sentences for the model."""

    content: str
    calls: list[ToolCallRequest] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def parse_reply(text: str, tools: Mapping[str, ToolSignature]) -> ParsedReply:
    """Find the calls of `tools` in a sampled reply."""
    visible = _without_reasoning(text)
    return _parse_tags(visible, tools) if OPEN in visible else _parse_fences(visible, tools)


def _without_reasoning(text: str) -> str:
    closed = re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)
    return closed.rpartition(REASONING_END)[2]  # what is left of it was opened by the prompt


def _parse_tags(text: str, tools: Mapping[str, ToolSignature]) -> ParsedReply:
    reply = ParsedReply("")
    content, position = [], 0
    while (start := text.find(OPEN, position)) >= 0:
        content.append(text[position:start])
        try:
            value, end = _decode(text, start + len(OPEN))
        except ValueError as exc:
            reply.errors.append(str(exc))
            position = _end_of_broken_call(text, start)
            continue
        position = end
        call = _check_call(value, text[start:end], tools)
        if isinstance(call, str):
            reply.errors.append(call)
        else:
            reply.calls.append(call)
    content.append(text[position:])
    reply.content = "".join(content).strip()
    return reply


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value of a call and where its closing tag ends. Raises ValueError with a sentence for the model."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        # Not strict: models write line breaks into strings as they are, and what is meant is clear.
        value, end = json.JSONDecoder(strict=False, parse_constant=_refuse_constant).raw_decode(text, start)
    except (ValueError, RecursionError) as exc:
        if CLOSE not in text[start:]:
            raise ValueError(f"A {OPEN} is not closed. End it with {CLOSE}.") from exc
        reason = f"{exc.msg} at character {exc.pos - start}" if isinstance(exc, json.JSONDecodeError) else str(exc)
        raise ValueError(f"A {OPEN} does not hold valid JSON ({reason}). {_SHAPE}") from exc
    end += len(text[end:]) - len(text[end:].lstrip())
    if not text.startswith(CLOSE, end):
        if CLOSE not in text[end:]:
            raise ValueError(f"A {OPEN} is not closed. End it with {CLOSE}.")
        raise ValueError(f"A {OPEN} holds more than one JSON object. {_SHAPE}")
    return value, end + len(CLOSE)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _end_of_broken_call(text: str, start: int) -> int:
    """Where to go on: after its closing tag, or at the next opening tag if that comes first."""
    inside = start + len(OPEN)
    close, following = text.find(CLOSE, inside), text.find(OPEN, inside)
    if close >= 0 and not 0 <= following < close:
        return close + len(CLOSE)
    return following if following >= 0 else len(text)


def _check_call(value: Any, raw: str, tools: Mapping[str, ToolSignature]) -> ToolCallRequest | str:
    """The call, or what is wrong with it."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return f'A {OPEN} has no "name". {_SHAPE}'
    name, arguments = value["name"], value.get("arguments")
    tool = tools.get(name)
    if tool is None:
        offered = f"Use one of: {', '.join(sorted(tools))}." if tools else "No tools are offered; answer in plain text."
        return f'There is no tool named "{name}". {offered}'
    if not isinstance(arguments, dict):
        return f'The call of "{name}" has no "arguments" object. {_SHAPE}'
    problem = _check_arguments(name, arguments, tool.parameters)
    return problem or ToolCallRequest(name, arguments, raw)


def _check_arguments(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    properties: Mapping[str, Any] = schema.get("properties", {})
    for argument in schema.get("required", ()):
        if argument not in arguments:
            return f'The call of "{name}" lacks the argument "{argument}". Add it.'
    for argument, value in arguments.items():
        if argument not in properties:
            takes = ", ".join(f'"{p}"' for p in properties) or "none"
            return f'The tool "{name}" has no argument "{argument}". It takes: {takes}.'
        if not _is_typed(value, properties[argument].get("type")):
            return (
                f'The argument "{argument}" of "{name}" must be of type {properties[argument]["type"]}, not {_type_of(value)}.'
            )
    try:
        unstorable = "\\u0000" in json.dumps(arguments, ensure_ascii=False).encode().decode()
    except UnicodeEncodeError:
        unstorable = True
    return f'The call of "{name}" contains a NUL or half of a surrogate pair. Leave it out.' if unstorable else None


def _is_typed(value: Any, wanted: Any) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted or list(_JSON_TYPES)
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _JSON_TYPES[n]) for n in names)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next(name for name, types in _JSON_TYPES.items() if isinstance(value, types))


def _parse_fences(text: str, tools: Mapping[str, ToolSignature]) -> ParsedReply:
    reply = ParsedReply("")
    content, position = [], 0
    for fence in _FENCE.finditer(text):
        language, code, closing = fence.groups()
        name = _FENCE_TOOL[language]
        argument = tools[name].code_argument if name in tools else None
        if argument is None:
            continue
        content.append(text[position : fence.start()])
        position = fence.end()
        if closing:
            reply.calls.append(ToolCallRequest(name, {argument: code}, fence.group()))
        else:
            reply.errors.append(f"The ```{language} block is not closed. End it with ``` on a line of its own.")
    content.append(text[position:])
    reply.content = "".join(content).strip()
    return reply
