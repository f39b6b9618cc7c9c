"""The shipped tools in real sandboxes: what a model reads of a call."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollouts.engine.tools import BashArguments, BashTool, EditTool, PythonTool, Tool, ToolResult, render_result
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.protocol import SandboxSpec, Session


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Session]:
    backend = BubblewrapBackend(tmp_path)
    await backend.start("x", SandboxSpec())
    session = await backend.connect("x")
    yield session
    await session.close()
    await backend.stop("x")


async def call(tool: Tool, timeout: float = 20.0, **arguments: Any) -> ToolResult:
    return await tool.call(tool.arguments.model_validate(arguments), timeout=timeout)


def shown(result: ToolResult) -> str:
    return render_result(result, max_chars=8000)


async def to_its_end(tool: Tool, result: ToolResult) -> ToolResult:
    """The last result of a command that may take longer than it may be quiet, with the output of all of them."""
    output = result.output
    while result.running:
        result = await call(tool, command="")
        output += result.output
    return replace(result, output=output)


class TestBash:
    async def test_a_command_has_output_and_exit_code(self, session: Session) -> None:
        assert shown(await call(BashTool(session), command="echo hello; exit_code() { return 3; }; exit_code")) == (
            "hello\n[exit code 3]"
        )

    async def test_a_quiet_program_goes_on_and_can_be_typed_into(self, session: Session) -> None:
        tool = BashTool(session, quiet_timeout=0.3)
        asked = await call(tool, command="read -p 'Name? ' name; echo Hello $name")
        assert asked.running and "still running, without output for 0.3 s" in shown(asked)
        output = asked.output
        while output != "Name? ":
            output += (await call(tool, command="")).output

        refused = await call(tool, command="ls")
        assert "has not ended" in refused.error and "C-c" in refused.error

        answered = await to_its_end(tool, await call(tool, command="Maria", is_input=True))
        assert (answered.output.strip(), answered.exit_code) == ("Hello Maria", 0)
        assert (await call(tool, command="echo next")).output == "next\n"

    async def test_a_program_can_be_interrupted(self, session: Session) -> None:
        tool = BashTool(session, quiet_timeout=0.3)
        assert (await call(tool, command="sleep 600")).running
        assert (await to_its_end(tool, await call(tool, command="C-c"))).exit_code == 130

    async def test_input_can_be_ended(self, session: Session) -> None:
        tool = BashTool(session, quiet_timeout=0.3)
        assert (await call(tool, command="cat > f")).running
        assert (await call(tool, command="text", is_input=True)).running
        assert (await to_its_end(tool, await call(tool, command="C-d", is_input=True))).exit_code == 0
        assert await session.read_file("f") == b"text\n"

    async def test_an_empty_command_waits_for_the_rest(self, session: Session) -> None:
        tool = BashTool(session, quiet_timeout=0.3)
        first = await call(tool, command="echo one; sleep 2; echo two")
        assert first.running
        whole = await to_its_end(tool, first)
        assert (whole.output, whole.exit_code) == ("one\ntwo\n", 0)

    @pytest.mark.parametrize("arguments", [{"command": ""}, {"command": "C-c"}, {"command": "y", "is_input": True}])
    async def test_nothing_can_be_typed_where_nothing_runs(self, session: Session, arguments: dict[str, Any]) -> None:
        assert "no program is running" in (await call(BashTool(session), **arguments)).error

    async def test_too_much_to_type_is_refused(self, session: Session) -> None:
        tool = BashTool(session, quiet_timeout=0.3)
        assert (await call(tool, command="cat > /dev/null")).running
        assert "more than 65536" in (await call(tool, command="x" * 70_000, is_input=True)).error
        assert (await to_its_end(tool, await call(tool, command="C-c"))).exit_code == 130

    async def test_a_time_limit_of_the_model_holds_within_that_of_the_tool(self, session: Session) -> None:
        for own, of_tool in ((0.3, 600.0), (600.0, 0.3)):
            arguments = BashArguments(command="sleep 600", timeout=own)
            result = await BashTool(session).call(arguments, timeout=of_tool)
            assert shown(result) == "[stopped at its time limit]"

    async def test_the_end_of_the_shell_is_told(self, session: Session) -> None:
        tool = BashTool(session)
        await call(tool, command="cd /tmp")
        assert shown(await call(tool, command="exit 3")).endswith(
            "[exit code 3]\n[the shell ended; the next command starts a new one in /tmp, without variables and functions]"
        )


class TestPython:
    async def test_output_and_value(self, session: Session) -> None:
        assert shown(await call(PythonTool(session), code="print(1)\n2 + 2")) == "1\n4"

    async def test_pictures_are_data(self, session: Session) -> None:
        code = """
class Plot:
    def _repr_png_(self): return b"\\x89PNG\\r\\n\\x1a\\n..."
Plot()
"""
        result = await call(PythonTool(session), code=code)
        assert [(picture.mime, picture.data[:4]) for picture in result.pictures] == [("image/png", b"\x89PNG")]

    async def test_a_restart_forgets(self, session: Session) -> None:
        tool = PythonTool(session)
        await call(tool, code="x = 1")
        assert (await call(tool, code="x")).output == "1"
        assert shown(await call(tool, restart=True)) == "[the next code runs in a new interpreter]"
        assert "NameError" in (await call(tool, code="x", restart=True)).output

    async def test_a_cell_at_its_time_limit_keeps_what_was_defined(self, session: Session) -> None:
        tool = PythonTool(session)
        await call(tool, code="x = 1\nimport time")
        result = await call(tool, 0.5, code="time.sleep(600)")
        assert result.timed_out and "KeyboardInterrupt" in result.output
        assert (await call(tool, code="x")).output == "1"

    async def test_the_end_of_the_interpreter_is_told(self, session: Session) -> None:
        result = await call(PythonTool(session), code="import os; os._exit(3)")
        assert "the interpreter ended" in result.note

    def test_a_call_asks_for_something(self) -> None:
        with pytest.raises(ValidationError, match="give code to run, or restart: true"):
            PythonTool.arguments.model_validate({"code": ""})


class TestEdit:
    async def test_a_file_is_made_changed_and_shown(self, session: Session) -> None:
        tool = EditTool(session)
        assert shown(await call(tool, command="create", path="/tmp/f.py", file_text="a = 1\nb = 2\n")) == (
            "Created /tmp/f.py with 2 lines."
        )
        assert shown(await call(tool, command="str_replace", path="/tmp/f.py", old_str="b = 2", new_str="b = 3")) == (
            "Edited /tmp/f.py:\n     1\ta = 1\n     2\tb = 3"
        )
        await call(tool, command="insert", path="/tmp/f.py", insert_line=0, new_str="import os")
        assert shown(await call(tool, command="view", path="/tmp/f.py", view_range=[2, -1])) == "     2\ta = 1\n     3\tb = 3"
        await call(tool, command="str_replace", path="/tmp/f.py", old_str="a = 1\n")
        assert await session.read_file("/tmp/f.py") == b"import os\nb = 3\n"
        for undo in ("undo_edit", "undo"):
            await call(tool, command=undo, path="/tmp/f.py")
        assert await session.read_file("/tmp/f.py") == b"a = 1\nb = 3\n"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"command": "create"}, "The command create needs the argument file_text."),
            ({"command": "str_replace", "new_str": "x"}, "The command str_replace needs the argument old_str."),
            ({"command": "insert", "new_str": "x"}, "The command insert needs the argument insert_line."),
            ({"command": "insert", "insert_line": 0}, "The command insert needs the argument new_str."),
            ({"command": "view", "path": "f"}, "The path 'f' is not absolute."),
        ],
    )
    async def test_what_is_missing_is_named(self, session: Session, arguments: dict[str, Any], said: str) -> None:
        await session.write_file("/tmp/f", b"text\n")
        result = await call(EditTool(session), **{"path": "/tmp/f", **arguments})
        assert result.error.startswith(said) and not result.output
        assert await session.read_file("/tmp/f") == b"text\n"

    @pytest.mark.parametrize(
        "arguments", [{"command": "delete"}, {"command": "view", "view_range": [1]}, {"command": "view", "lines": 3}]
    )
    def test_arguments_that_it_does_not_know_are_refused(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            EditTool.arguments.model_validate({"path": "/tmp/f", **arguments})

    def test_it_may_have_the_name_that_a_model_knows(self, session: Session) -> None:
        assert EditTool(session, name="str_replace_editor").name == "str_replace_editor"
