"""What a tool is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from sandboxes.protocol import Picture


@dataclass(frozen=True)
class ToolResult:
    """What came of a call. `output` is a program's; `error` and `note` are the tool's own words to the model.

    An `error` says why nothing was done (a refused argument); a `note` adds to what was done. After a result with
    `limit_exceeded`, a field of `sandboxes.protocol.Limits`, the agent ends the rollout.
    """

    output: str
    exit_code: int | None = None
    timed_out: bool = False
    truncated_bytes: int = 0
    error: str = ""
    note: str = ""
    running: bool = False  # the command goes on, and `note` says how to go on with it
    limit_exceeded: str = ""
    pictures: tuple[Picture, ...] = ()  # kept with the call; a model that sees is shown the first ones


class ToolArguments(BaseModel):
    """Base of a tool's arguments. Unknown ones are refused, so that a model learns of its mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tool(Protocol):
    """Something the model can call. Instances belong to one rollout."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """A sentence or two for the model."""
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


@dataclass(frozen=True)
class Signature:
    """A tool as `rollouts.llm.toolcalls.parse_reply` wants to know it."""

    parameters: Mapping[str, Any]
    code_argument: str | None


def signature(tool: Tool) -> Signature:
    """What parsing needs to know of a tool."""
    return Signature(schema_of(tool.arguments), tool.code_argument)


@functools.cache
def schema_of(arguments: type[ToolArguments]) -> Mapping[str, Any]:
    """Made once for each kind of tool: every rollout has tools of its own, and pydantic takes its time."""
    return arguments.model_json_schema()
