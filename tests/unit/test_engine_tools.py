"""How tools are offered to a model, and how their results read."""

from __future__ import annotations

import json

import pytest
from pydantic import Field

from rollouts.engine.tools import (
    BashArguments,
    Tool,
    ToolArguments,
    ToolResult,
    cut_middle,
    describe_tools,
    render_result,
    signature,
)
from rollouts.llm.toolcalls import parse_reply


class Offer:
    """A tool that is only described."""

    code_argument: str | None = None

    def __init__(self, name: str, arguments: type[ToolArguments]) -> None:
        self.name = name
        self.description = f"Use {name}."
        self.arguments = arguments

    async def call(self, arguments: ToolArguments, *, timeout: float) -> ToolResult:
        raise NotImplementedError


class SearchArguments(ToolArguments):
    """Not for the model."""

    query: str = Field(description="What to look for.")
    limit: int | None = Field(None, ge=1, description="How much of it.")


def test_tools_are_described_in_the_hermes_convention() -> None:
    text = describe_tools([Offer("search", SearchArguments), Offer("look", SearchArguments)])

    offers = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(offer) for offer in offers] == [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Use {name}.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "query": {"type": "string", "description": "What to look for."},
                        "limit": {"type": "integer", "minimum": 1, "description": "How much of it."},
                    },
                    "required": ["query"],
                },
            },
        }
        for name in ("search", "look")
    ]


def test_no_tools_are_not_described() -> None:
    assert describe_tools([]) == ""


def test_a_call_as_described_is_understood() -> None:
    tool: Tool = Offer("bash", BashArguments)
    reply = parse_reply(
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', {"bash": signature(tool)}
    )

    assert [(call.name, call.arguments) for call in reply.calls] == [("bash", {"command": "ls"})]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult("hello\n", 0), "hello"),
        (ToolResult("", 0), "[no output]"),
        (ToolResult("oops\n", 2), "oops\n[exit code 2]"),
        (ToolResult("", None, timed_out=True), "[stopped at its time limit]"),
        (ToolResult("", error="no such file"), "Error: no such file"),
        (ToolResult("1\n", note="still running", running=True), "1\n[still running]"),
        (ToolResult("", 137, limit_exceeded="memory_mb"), "[ended for exceeding the sandbox's limit memory_mb]"),
        (ToolResult("0123456789", 0), "012\n[…]\n89\n[5 characters cut from the middle]"),
    ],
)
def test_results_say_what_their_output_does_not(result: ToolResult, text: str) -> None:
    assert render_result(result, max_chars=5) == text


def test_a_text_that_fits_is_not_cut() -> None:
    assert cut_middle("abc", 3) == ("abc", 0)
    assert cut_middle("abcd", 3) == ("ab\n[…]\nd", 1)
