"""The `bash` tool."""

from __future__ import annotations

from pydantic import Field

from rollouts.engine.tools.base import ToolArguments, ToolResult
from sandboxes.errors import InputRefused
from sandboxes.protocol import CommandResult, Session

# A program that is silent for this long probably waits for input, or serves and never ends.
QUIET_SECONDS = 30.0

_KEYS = {"C-c": b"\x03", "C-d": b"\x04", "C-z": b"\x1a"}
_HOW_TO_GO_ON = (
    "An empty command waits for more output; is_input types the command, with Enter, into the program; C-c interrupts it, "
    "and C-d ends its input."
)


class BashArguments(ToolArguments):
    command: str = Field(description="The command to run; empty to wait for more output of the one that still runs.")
    is_input: bool = Field(
        False, description="Type the command into the program that still runs. C-c, C-d and C-z stand for these keys."
    )
    timeout: float | None = Field(None, gt=0, description="Seconds after which to end the command.")


class BashTool:
    """The sandbox's persistent shell, on a terminal.

    A command that prints nothing for `quiet_timeout` seconds is shown as far as it came, and goes on until its time limit.
    """

    name = "bash"
    description = (
        "Run a command in a persistent bash shell and return its output. A program that goes on without output, or waits for "
        "input, can be waited for, typed into and interrupted by further calls."
    )
    arguments = BashArguments
    code_argument = "command"

    def __init__(self, session: Session, *, quiet_timeout: float = QUIET_SECONDS) -> None:
        self._session = session
        self._quiet_timeout = quiet_timeout
        self._running = False  # a command's end has not been shown yet

    async def call(self, arguments: BashArguments, *, timeout: float) -> ToolResult:
        command = arguments.command
        seconds = min(arguments.timeout or timeout, timeout)
        is_input = arguments.is_input or command in _KEYS or not command
        if is_input and not self._running:
            return ToolResult("", error="no program is running that could be typed into or waited for.")
        if self._running and not is_input:
            return ToolResult("", error=f"the command before this one has not ended as far as was shown. {_HOW_TO_GO_ON}")
        if is_input:
            try:
                result = await self._session.bash_input(_typed(command), timeout=seconds, quiet_timeout=self._quiet_timeout)
            except InputRefused as error:
                return ToolResult("", error=str(error))
        else:
            result = await self._session.bash(command, timeout=seconds, quiet_timeout=self._quiet_timeout)
        self._running = result.running
        return ToolResult(
            result.output,
            result.exit_code,
            result.timed_out,
            result.truncated_bytes,
            note=self._note(result),
            running=result.running,
            limit_exceeded=result.limit_exceeded,
        )

    def _note(self, result: CommandResult) -> str:
        if result.running:
            return f"still running, without output for {self._quiet_timeout:g} s. {_HOW_TO_GO_ON}"
        if result.restarted:
            return f"the shell ended; the next command starts a new one in {result.cwd}, without variables and functions"
        return ""


def _typed(command: str) -> bytes:
    if command in _KEYS:
        return _KEYS[command]
    return command.encode() if not command or command.endswith("\n") else f"{command}\n".encode()
