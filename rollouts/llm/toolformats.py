"""How models write tool calls: reading them from sampled text, whole or as far as it has come.

`hermes` is `<tool_call>` around JSON (Qwen2.5, Qwen3, Hermes, and any model that is told so), `qwen3_coder` is `<tool_call>`
around `<function=…>` and `<parameter=…>` tags, `llama3_json` is a reply that is a JSON object with `name` and `parameters`. The
chat templates of all of them take the arguments as an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rollouts.llm import portable_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class RawCall(NamedTuple):
    """A call as written, before anything is checked against a tool. `end` is where it ends in the text."""

    name: Any
    arguments: Any
    end: int


class Unclosed(ValueError):
    """The text ends within the call."""


class ToolFormat(Protocol):
    """One way to write calls. Errors are sentences for the model."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> str:
        """A sentence that says how a call is to be written."""
        ...

    @property
    def closing(self) -> str:
        """What every call ends with."""
        ...

    def start(self, text: str, *, alone: bool) -> int:
        """Where the next call begins, -1 when there is none. `alone`: only calls and space came before."""
        ...

    def held_back(self, text: str, *, alone: bool) -> int:
        """How many characters at the end of a text without calls may be the beginning of one."""
        ...

    def read(self, text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> RawCall:
        """The call at `start`. `schemas` are the tools' parameters. Raises ValueError; `Unclosed` when it may still go on."""
        ...

    def skip(self, text: str, start: int) -> int:
        """Where to go on after a call that cannot be read."""
        ...


@dataclass(frozen=True)
class _Tagged:
    """What the formats within `<tool_call>` tags have in common."""

    name: str
    shape: str
    closing: str = CLOSE

    def start(self, text: str, *, alone: bool) -> int:
        return text.find(OPEN)

    def held_back(self, text: str, *, alone: bool) -> int:
        return partial_end(text, OPEN)

    def skip(self, text: str, start: int) -> int:
        """After its closing tag, or at the next opening tag if that comes first."""
        inside = start + len(OPEN)
        close, following = text.find(CLOSE, inside), text.find(OPEN, inside)
        if close >= 0 and not 0 <= following < close:
            return close + len(CLOSE)
        return following if following >= 0 else len(text)

    def _unclosed(self) -> Unclosed:
        return Unclosed(f"A {OPEN} is not closed. End it with {CLOSE}.")


class _Hermes(_Tagged):
    def read(self, text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> RawCall:
        start += len(OPEN)
        try:
            value, end = _decode_json(text, start)
        except ValueError as exc:
            if CLOSE not in text[start:]:
                raise self._unclosed() from exc
            raise ValueError(f"A {OPEN} does not hold valid JSON ({_reason(exc, text, start)}). {self.shape}") from exc
        end = _skip_space(text, end)
        if not text.startswith(CLOSE, end):
            if CLOSE not in text[end:]:
                raise self._unclosed()
            raise ValueError(f"A {OPEN} holds more than one JSON object. {self.shape}")
        fields = value if isinstance(value, dict) else {}
        return RawCall(fields.get("name"), fields.get("arguments"), end + len(CLOSE))


class _Qwen3Coder(_Tagged):
    def read(self, text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> RawCall:
        close = text.find(CLOSE, start)
        if close < 0:
            raise self._unclosed()
        function = _FUNCTION.fullmatch(text[start + len(OPEN) : close].strip())
        if function is None:
            raise ValueError(f"A {OPEN} does not hold one <function=…> … </function>. {self.shape}")
        name, body = function.groups()
        properties = schemas.get(name, {}).get("properties", {})
        arguments = {}
        position = 0
        for parameter in _PARAMETER.finditer(body):
            if body[position : parameter.start()].strip():
                break
            key, value = parameter.groups()
            arguments[key] = _typed(value, properties.get(key, {}))
            position = parameter.end()
        if body[position:].strip():
            raise ValueError(f"The call of {name!r} holds text outside its <parameter=…> tags. {self.shape}")
        return RawCall(name, arguments, close + len(CLOSE))


@dataclass(frozen=True)
class _Llama3Json:
    name: str = "llama3_json"
    shape: str = 'Write nothing but {"name": "…", "parameters": {…}} with valid JSON.'
    closing: str = "}"

    def start(self, text: str, *, alone: bool) -> int:
        tag = text.find(_PYTHON_TAG)
        # After other text a brace is no call: an answer that talks about JSON is an answer.
        call = _JSON_CALL.match(text) if alone else None
        return call.end("before") if call else tag

    def held_back(self, text: str, *, alone: bool) -> int:
        if alone and _JSON_CALL_BEGINNING.fullmatch(text):
            return len(text)
        return partial_end(text, _PYTHON_TAG)

    def read(self, text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> RawCall:
        inside = start + len(_PYTHON_TAG) if text.startswith(_PYTHON_TAG, start) else start
        try:
            value, end = _decode_json(text, inside)
        except ValueError as exc:
            raise Unclosed(f"The call is not valid JSON ({_reason(exc, text, inside)}). {self.shape}") from exc
        fields = value if isinstance(value, dict) else {}
        return RawCall(fields.get("name"), fields.get("parameters", fields.get("arguments")), end)

    def skip(self, text: str, start: int) -> int:
        return len(text)


_PYTHON_TAG = "<|python_tag|>"
_JSON_CALL = re.compile(r'(?P<before>[\s;]*)\{\s*"(name|parameters|type)"\s*:')
_JSON_CALL_BEGINNING = re.compile(r'[\s;]*(\{\s*("(\w*("\s*)?)?)?)?')
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

HERMES: ToolFormat = _Hermes("hermes", f'Write {OPEN}{{"name": "…", "arguments": {{…}}}}{CLOSE} with valid JSON inside.')
_FORMATS: dict[str, ToolFormat] = {
    each.name: each
    for each in (
        HERMES,
        _Llama3Json(),
        _Qwen3Coder(
            "qwen3_coder", f"Write {OPEN}<function=…><parameter=…>…</parameter></function>{CLOSE}, one <parameter=…> each."
        ),
    )
}
TOOL_FORMATS = tuple(_FORMATS)


def tool_format(name: str) -> ToolFormat:
    """The format of this name; Hermes for the empty one. Raises ValueError."""
    try:
        return _FORMATS[name or HERMES.name]
    except KeyError:
        raise ValueError(f"there is no tool format {name!r}; there are {', '.join(TOOL_FORMATS)}") from None


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The section of a system prompt that offers OpenAI-style `tools`, in the Hermes convention; empty when there are none."""
    if not tools:
        return ""
    offers = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\n"
        "You may call one or more functions. Their signatures are within <tools></tools> tags:\n"
        f"<tools>\n{offers}\n</tools>\n\n"
        f"To call a function, write a JSON object with its name and arguments within {OPEN}{CLOSE} tags:\n"
        f'{OPEN}\n{{"name": <function name>, "arguments": <arguments object>}}\n{CLOSE}'
    )


def _decode_json(text: str, start: int) -> tuple[Any, int]:
    return portable_json.decode(text, _skip_space(text, start))


def _reason(exc: Exception, text: str, start: int) -> str:
    if isinstance(exc, json.JSONDecodeError):
        return f"{exc.msg} at character {exc.pos - _skip_space(text, start)}"
    return str(exc)


def _skip_space(text: str, position: int) -> int:
    return position + len(text[position:]) - len(text[position:].lstrip())


def partial_end(text: str, tag: str) -> int:
    """The length of the longest beginning of `tag` that `text` ends with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A parameter's value. Text where the schema wants text or does not say; else JSON, if it is."""
    wanted = schema.get("type")
    types = {wanted} if isinstance(wanted, str) else set(wanted or ())
    if not types or types == {"string"}:
        return text
    try:
        value = portable_json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    return text if isinstance(value, str) or ("string" in types and value is not None) else value
