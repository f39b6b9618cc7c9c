"""Tools that the shipped agent can offer to a model, and how they are described and answered in text."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from sandboxes.protocol import Session


@dataclass(frozen=True)
class ToolResult:
    """What came of a call. `error` is the tool's word to the model (a refused argument), apart from a program's `output`."""

    output: str
    exit_code: int | None = None
    timed_out: bool = False
    truncated_bytes: int = 0
    error: str = ""


class ToolArguments(BaseModel):
    """Base of a tool's arguments. Unknown ones are refused, so that a model learns of its mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tool(Protocol):
    """Something the model can call. Instances belong to one rollout."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """One sentence for the model."""
        ...

    @property
    def arguments(self) -> type[ToolArguments]: ...

    @property
    def code_argument(self) -> str | None:
        """The one argument that a fenced code block fills; None when fences do not call this tool."""
        ...

    async def call(self, arguments: Any, *, timeout: float) -> ToolResult:
        """Carry out a call with validated `arguments`, within `timeout` seconds (then with `timed_out`).

        What the model can mend comes back as `error`; an exception is the environment's or the sandbox's failure.
        """
        ...


class BashArguments(ToolArguments):
    command: str = Field(description="The command to run.")


class BashTool:
    """The sandbox's persistent shell."""

    name = "bash"
    description = "Run a command in a persistent bash shell and return its output."
    arguments = BashArguments
    code_argument = "command"

    def __init__(self, session: Session) -> None:
        self._session = session

    async def call(self, arguments: BashArguments, *, timeout: float) -> ToolResult:
        result = await self._session.bash(arguments.command, timeout=timeout)
        return ToolResult(result.output, result.exit_code, result.timed_out, result.truncated_bytes)


class PythonArguments(ToolArguments):
    code: str = Field(description="The Python code to run.")


class PythonTool:
    """The sandbox's persistent Python interpreter."""

    name = "python"
    description = "Run Python code in a persistent interpreter and return what it prints and the value of its last expression."
    arguments = PythonArguments
    code_argument = "code"

    def __init__(self, session: Session) -> None:
        self._session = session

    async def call(self, arguments: PythonArguments, *, timeout: float) -> ToolResult:
        result = await self._session.python(arguments.code, timeout=timeout)
        parts = [part.rstrip("\n") for part in (result.output, result.value, result.error) if part]
        return ToolResult("\n".join(parts), timed_out=result.timed_out, truncated_bytes=result.truncated_bytes)


@dataclass(frozen=True)
class Signature:
    """A tool as `rollouts.llm.toolcalls.parse_reply` wants to know it."""

    parameters: Mapping[str, Any]
    code_argument: str | None


def signature(tool: Tool) -> Signature:
    """What parsing needs to know of a tool."""
    return Signature(_schema(tool.arguments), tool.code_argument)


@functools.cache
def _schema(arguments: type[ToolArguments]) -> Mapping[str, Any]:
    """Made once for each kind of tool: every rollout has tools of its own, and pydantic takes its time."""
    return arguments.model_json_schema()


def describe_tools(tools: Sequence[Tool]) -> str:
    """The section of a system prompt that offers these tools, in the Hermes convention; empty when there are none.

    We write it rather than the chat template, because templates differ in how they do and some ignore tools altogether.
    """
    if not tools:
        return ""
    offers = "\n".join(json.dumps({"type": "function", "function": _function(tool)}, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\n"
        "You may call one or more functions. Their signatures are within <tools></tools> tags:\n"
        f"<tools>\n{offers}\n</tools>\n\n"
        "To call a function, write a JSON object with its name and arguments within <tool_call></tool_call> tags:\n"
        '<tool_call>\n{"name": <function name>, "arguments": <arguments object>}\n</tool_call>'
    )


def _function(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": _plain_schema(_schema(tool.arguments))}


def _plain_schema(schema: Any) -> Any:
    """Without the titles that pydantic adds; they cost tokens in every prompt and say nothing."""
    if isinstance(schema, dict):
        return {
            key: {name: _plain_schema(sub) for name, sub in value.items()} if key == "properties" else _plain_schema(value)
            for key, value in schema.items()
            if key not in ("title", "additionalProperties") and not (key == "description" and "properties" in schema)
        }
    return schema


def render_result(result: ToolResult, *, max_chars: int) -> str:
    """A tool's result as the model reads it: at most `max_chars` characters of output, then what the output does not say."""
    output, cut = cut_middle(result.output.rstrip("\n"), max_chars)
    notes = []
    if result.error:
        notes.append(f"Error: {result.error}")
    if result.timed_out:
        notes.append("[stopped at its time limit]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    if cut:
        notes.append(f"[{cut} characters cut from the middle]")
    if result.truncated_bytes:
        notes.append(f"[{result.truncated_bytes} bytes had been cut from the middle before]")
    return "\n".join(filter(None, [output, *notes])) or "[no output]"


def cut_middle(text: str, max_chars: int) -> tuple[str, int]:
    """At most `max_chars` characters of a text, its beginning and its end, and how many were left out between them."""
    cut = len(text) - max_chars
    if cut <= 0:
        return text, 0
    head = (max_chars + 1) // 2
    tail = max_chars - head
    return f"{text[:head]}\n[…]\n{text[len(text) - tail :]}", cut
