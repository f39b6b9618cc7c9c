"""The `python` tool."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollouts.engine.tools.base import ToolArguments, ToolResult
from sandboxes.protocol import Session

_ENDED = "the interpreter ended; the next code runs in a new one, without what was defined"


class PythonArguments(ToolArguments):
    code: str = Field("", description="The Python code to run.")
    restart: bool = Field(False, description="Start a new interpreter first; all that was defined is lost.")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.code and not self.restart:
            raise ValueError("give code to run, or restart: true")
        return self


class PythonTool:
    """The sandbox's persistent Python interpreter.

    A cell at its time limit gets a KeyboardInterrupt. If it obeys, what was defined is kept.
    """

    name = "python"
    description = "Run Python code in a persistent interpreter and return what it prints and the value of its last expression."
    arguments = PythonArguments
    code_argument = "code"

    def __init__(self, session: Session) -> None:
        self._session = session

    async def call(self, arguments: PythonArguments, *, timeout: float) -> ToolResult:
        if arguments.restart:
            await self._session.restart_python()
        if not arguments.code:
            return ToolResult("", note="the next code runs in a new interpreter")
        result = await self._session.python(arguments.code, timeout=timeout)
        parts = [part.rstrip("\n") for part in (result.output, result.value, result.error) if part]
        return ToolResult(
            "\n".join(parts),
            timed_out=result.timed_out,
            truncated_bytes=result.truncated_bytes,
            note=_ENDED if result.restarted else "",
            limit_exceeded=result.limit_exceeded,
            pictures=result.pictures,
        )
