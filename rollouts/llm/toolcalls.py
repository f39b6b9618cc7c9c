"""Tool calls in a whole reply, checked against the tools: in the model's tool format, or fenced code for tools that take code.

Parsing never raises. What is wrong with a reply comes back as sentences for the model to read. The rules:

* Reasoning (`<think>…</think>`, also unclosed, also with the opening tag in the prompt) is neither searched nor content.
* If any call in the tool format is there, fences are content. Otherwise a fence marked python, bash or sh (for bash) calls the
  tool of that name, when it is offered and has a `code_argument`.
* An unclosed tag or fence is an error, not a call: the text may have been cut in the middle of the code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollouts.llm.toolformats import HERMES, OPEN, RawCall, ToolFormat
from rollouts.llm.turns import REASONING_END
from rollouts.llm.types import ToolCallRequest

_FENCE = re.compile(r"^```(python|bash|sh)[ \t]*\n(.*?)(^```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_FENCE_TOOL = {"python": "python", "bash": "bash", "sh": "bash"}
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


def parse_reply(text: str, tools: Mapping[str, ToolSignature], tool_format: ToolFormat = HERMES) -> ParsedReply:
    """Find the calls of `tools` in a sampled reply."""
    visible = _without_reasoning(text)
    if tool_format.start(visible, alone=True) >= 0:
        return _parse_calls(visible, tools, tool_format)
    return _parse_fences(visible, tools)


def _without_reasoning(text: str) -> str:
    closed = re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)
    return closed.rpartition(REASONING_END)[2]  # what is left of it was opened by the prompt


def _parse_calls(text: str, tools: Mapping[str, ToolSignature], tool_format: ToolFormat) -> ParsedReply:
    reply = ParsedReply("")
    schemas = {name: tool.parameters for name, tool in tools.items()}
    content: list[str] = []
    while (start := tool_format.start(text, alone=not "".join(content).strip(" \n\t;"))) >= 0:
        content.append(text[:start])
        try:
            raw = tool_format.read(text, start, schemas)
        except ValueError as exc:
            reply.errors.append(str(exc))
            text = text[tool_format.skip(text, start) :]
            continue
        call = _check_call(raw, text[start : raw.end], tools, tool_format)
        text = text[raw.end :]
        if isinstance(call, str):
            reply.errors.append(call)
        else:
            reply.calls.append(call)
    reply.content = "".join([*content, text]).strip()
    return reply


def _check_call(call: RawCall, raw: str, tools: Mapping[str, ToolSignature], tool_format: ToolFormat) -> ToolCallRequest | str:
    """The call, or what is wrong with it."""
    name, arguments = call.name, call.arguments
    if not isinstance(name, str):
        return f'A {OPEN} has no "name". {tool_format.shape}'
    tool = tools.get(name)
    if tool is None:
        offered = f"Use one of: {', '.join(sorted(tools))}." if tools else "No tools are offered; answer in plain text."
        return f'There is no tool named "{name}". {offered}'
    if not isinstance(arguments, dict):
        return f'The call of "{name}" has no "arguments" object. {tool_format.shape}'
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
    return f'The call of "{name}" contains a NUL. Leave it out.' if _holds_nul(arguments) else None


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, Mapping):
        return any(_holds_nul(part) for item in value.items() for part in item)
    return isinstance(value, list) and any(map(_holds_nul, value))


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
