"""Tool calls in sampled text, well-formed and not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.llm.toolcalls import parse_reply


@dataclass(frozen=True)
class Signature:
    parameters: dict[str, Any] = field(default_factory=dict)
    code_argument: str | None = None


def code_tool(argument: str) -> Signature:
    return Signature({"properties": {argument: {"type": "string"}}, "required": [argument]}, argument)


TOOLS = {
    "python": code_tool("code"),
    "bash": code_tool("command"),
    "search": Signature(
        {
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "weight": {"type": "number"},
                "tags": {"type": ["array", "null"]},
                "extra": {},
            },
            "required": ["query"],
        }
    ),
}


def only_error(text: str) -> str:
    reply = parse_reply(text, TOOLS)
    assert not reply.calls
    assert len(reply.errors) == 1
    return reply.errors[0]


def test_plain_text_is_content():
    reply = parse_reply("  The answer is 4.\n", TOOLS)
    assert (reply.content, reply.calls, reply.errors) == ("The answer is 4.", [], [])


def test_several_calls_in_one_reply():
    text = """First I look.
<tool_call>
{"name": "bash", "arguments": {"command": "ls"}}
</tool_call>
<tool_call>{"name": "search", "arguments": {"query": "x", "limit": 3, "weight": 1, "tags": null, "extra": true}}</tool_call>
Then we see."""
    reply = parse_reply(text, TOOLS)
    assert [(call.name, call.arguments) for call in reply.calls] == [
        ("bash", {"command": "ls"}),
        ("search", {"query": "x", "limit": 3, "weight": 1, "tags": None, "extra": True}),
    ]
    assert reply.calls[0].raw.startswith("<tool_call>\n{")
    assert reply.calls[0].raw.endswith("</tool_call>")
    assert reply.content.split() == ["First", "I", "look.", "Then", "we", "see."]
    assert reply.errors == []


def test_line_breaks_inside_strings_and_tags_inside_code_are_understood():
    code = "print('</tool_call>')\nprint('<tool_call>')"
    reply = parse_reply('<tool_call>{"name": "python", "arguments": {"code": "' + code + '"}}</tool_call>', TOOLS)
    assert reply.errors == []
    assert reply.calls[0].arguments == {"code": code}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>{'name': 'bash'}</tool_call>", "does not hold valid JSON"),
        ('<tool_call>{"name": "search", "arguments": {"query": "x", "weight": NaN}}</tool_call>', "NaN is not JSON"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}', "is not closed"),
        ('<tool_call>{"name": "bash", "arg', "is not closed"),
        ("<tool_call>", "is not closed"),
        ('<tool_call>{"name": "bash"} {"name": "bash"}</tool_call>', "more than one"),
        ("<tool_call>[]</tool_call>", 'has no "name"'),
        ('<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        (
            '<tool_call>{"name": "browse", "arguments": {}}</tool_call>',
            'no tool named "browse". Use one of: bash, python, search.',
        ),
        ('<tool_call>{"name": "bash"}</tool_call>', 'no "arguments" object'),
        ('<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', 'no "arguments" object'),
        ('<tool_call>{"name": "bash", "arguments": {}}</tool_call>', 'lacks the argument "command"'),
        ('<tool_call>{"name": "bash", "arguments": {"command": 1}}</tool_call>', "must be of type string, not integer"),
        ('<tool_call>{"name": "search", "arguments": {"query": "x", "limit": true}}</tool_call>', "integer, not boolean"),
        (
            '<tool_call>{"name": "bash", "arguments": {"command": "ls", "cwd": "/"}}</tool_call>',
            'no argument "cwd". It takes: "command"',
        ),
        ('<tool_call>{"name": "bash", "arguments": {"command": "a\\u0000"}}</tool_call>', "NUL"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "\\ud800"}}</tool_call>', "surrogate"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "valid JSON"),
        ('<tool_call>{"name": "search", "arguments": {"query": "x", "limit": 1e999}}</tool_call>', "too large for a number"),
        ('<tool_call>{"name": "search", "arguments": {"query": "x", "limit": 1' + "0" * 30 + "}}</tool_call>", "64-bit"),
        ('<tool_call>{"name": "search", "arguments": ' + '{"query":' * 300 + "1" + "}" * 301 + "</tool_call>", "valid JSON"),
        ("```python\nprint(1)", "block is not closed"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    assert message in only_error(text)


def test_code_may_speak_of_nul():
    reply = parse_reply('<tool_call>{"name": "bash", "arguments": {"command": "printf \'\\\\u0000\'"}}</tool_call>', TOOLS)
    assert reply.calls[0].arguments == {"command": "printf '\\u0000'"}


@pytest.mark.parametrize("broken", ["<tool_call>{oops</tool_call>", "<tool_call>{oops\n"])
def test_a_broken_call_does_not_hide_a_good_one(broken):
    reply = parse_reply(broken + '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', TOOLS)
    assert len(reply.errors) == 1
    assert [call.name for call in reply.calls] == ["bash"]


def test_without_tools_a_call_is_answered_with_a_sentence():
    assert parse_reply('<tool_call>{"name": "bash", "arguments": {}}</tool_call>', {}).errors == [
        'There is no tool named "bash". No tools are offered; answer in plain text.'
    ]


@pytest.mark.parametrize(
    ("language", "name", "argument"), [("python", "python", "code"), ("bash", "bash", "command"), ("sh", "bash", "command")]
)
def test_fenced_code_calls_the_tool_of_that_name(language, name, argument):
    reply = parse_reply(f"Let me try.\n```{language}\necho = 1\necho\n```\nDone.", TOOLS)
    assert [(call.name, call.arguments) for call in reply.calls] == [(name, {argument: "echo = 1\necho\n"})]
    assert reply.content == "Let me try.\n\nDone."


def test_fences_that_call_nothing_are_content():
    text = "```json\n{}\n```\n```python\nprint(1)\n```"
    reply = parse_reply(text, {"bash": TOOLS["bash"]})
    assert (reply.content, reply.calls, reply.errors) == (text, [], [])


def test_tags_win_over_fences():
    text = 'Like this:\n```python\nprint(1)\n```\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    reply = parse_reply(text, TOOLS)
    assert [call.name for call in reply.calls] == ["bash"]
    assert "print(1)" in reply.content


@pytest.mark.parametrize(
    "reasoning",
    [
        "<think>\n```python\nprint(1)\n```\n</think>",
        "the prompt opened it\n```python\nprint(1)\n```\n</think>",
        '<think><tool_call>{"name": "bash"}</tool_call></think><think>twice</think>',
    ],
)
def test_reasoning_is_neither_searched_nor_content(reasoning):
    reply = parse_reply(f"{reasoning}The answer is 1.", TOOLS)
    assert (reply.content, reply.calls, reply.errors) == ("The answer is 1.", [], [])


def test_unfinished_reasoning_is_no_answer():
    reply = parse_reply("<think>\n```python\nprint(1)\n```\nhm", TOOLS)
    assert (reply.content, reply.calls, reply.errors) == ("", [], [])


CALL = '{"name": "bash", "arguments": {"command": "ls"}}'
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "```python\n", "```bash\n", "```"]
FRAGMENTS = st.sampled_from([*TAGS, CALL, '{"name":', "}", "\n", '"', "NaN"])


@given(st.lists(FRAGMENTS | st.text(max_size=5), max_size=15).map("".join))
def test_no_text_makes_it_raise(text):
    reply = parse_reply(text, TOOLS)
    for call in reply.calls:
        assert call.raw in text
        assert call.name in TOOLS
