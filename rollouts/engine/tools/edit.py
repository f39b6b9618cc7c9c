"""The `edit` tool, with the arguments of the widely used editor tool that models know."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rollouts.engine.tools.base import ToolArguments, ToolResult
from sandboxes.editor import Editor
from sandboxes.edits import EditError
from sandboxes.protocol import Session


def _accept_undo(command: Any) -> Any:
    return "undo_edit" if command == "undo" else command


class EditArguments(ToolArguments):
    command: Annotated[
        Literal["view", "create", "str_replace", "insert", "undo_edit"],
        BeforeValidator(_accept_undo),
        Field(description="What to do."),
    ]
    path: str = Field(description="Absolute path of a file, or of a directory to view.")
    file_text: str | None = Field(None, description="For create: what the new file contains.")
    old_str: str | None = Field(None, description="For str_replace: text that is in the file exactly once.")
    new_str: str | None = Field(
        None, description="For str_replace: what to put in its place, nothing if left out. For insert: the lines to add."
    )
    insert_line: int | None = Field(None, description="For insert: the line after which to add them, 0 for the beginning.")
    view_range: list[int] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="For view: the first and the last line, from 1; -1 is the end.",
    )


class EditTool:
    """Files of the sandbox, viewed and changed exactly. `name` is for models that were trained on another one."""

    description = (
        "View, create and change text files. A change that cannot be made exactly as asked is refused with the reason."
    )
    arguments = EditArguments
    code_argument = None

    def __init__(self, session: Session, *, name: str = "edit") -> None:
        self.name = name
        self._editor = Editor(session)

    async def call(self, arguments: EditArguments, *, timeout: float) -> ToolResult:
        try:
            return ToolResult(await self._carry_out(arguments))
        except EditError as error:
            return ToolResult("", error=str(error))

    async def _carry_out(self, arguments: EditArguments) -> str:
        path = arguments.path
        match arguments.command:
            case "view":
                first, last = arguments.view_range or (1, -1)
                return await self._editor.view(path, first, last)
            case "create":
                return await self._editor.create(path, _needed(arguments, "file_text"))
            case "str_replace":
                return await self._editor.replace(path, _needed(arguments, "old_str"), arguments.new_str or "")
            case "insert":
                line, new = _needed(arguments, "insert_line"), _needed(arguments, "new_str")
                return await self._editor.insert(path, line, new)
            case "undo_edit":
                return await self._editor.undo(path)


def _needed(arguments: EditArguments, name: str) -> Any:
    value = getattr(arguments, name)
    if value is None:
        raise EditError(f"The command {arguments.command} needs the argument {name}.")
    return value
