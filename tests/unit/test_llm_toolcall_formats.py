"""Tool formats, in whole replies and while a reply is sampled."""

from __future__ import annotations

import itertools
import json
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.llm.replies import ReplyPart, ReplyReader
from rollouts.llm.toolcalls import parse_reply
from rollouts.llm.toolformats import TOOL_FORMATS, describe_tools, tool_format

SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "lines": {"type": "integer"},
        "deep": {"type": "object"},
        "all": {"type": "boolean"},
    },
}


class Signature(NamedTuple):
    parameters: dict
    code_argument: str | None = None


TOOLS = {"run": Signature(SCHEMA), "stop": Signature({"type": "object", "properties": {}})}
ARGUMENTS = {"command": 'echo "</b>"\nls', "lines": 3, "deep": {"a": [1, None]}, "all": True}


def written(name: str, arguments: dict, style: str) -> str:
    """A call as the model of this tool format writes it."""
    if style == "hermes":
        return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
    if style == "llama3_json":
        return json.dumps({"name": name, "parameters": arguments})
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def read(text: str, style: str, *, pieces: list[int] | None = None, **options) -> list[ReplyPart]:
    """Parts of the reply, fed in pieces of these lengths (over and over); character by character if not said."""
    reader = ReplyReader(tool_format(style), schemas={name: tool.parameters for name, tool in TOOLS.items()}, **options)
    parts, position = [], 0
    for length in itertools.cycle(pieces or [1]):
        if position >= len(text):
            break
        parts += reader.feed(text[position : position + length])
        position += length
    return parts + reader.finish()


def merged(parts: list[ReplyPart]) -> list[tuple[str, str]]:
    """Kinds and texts, with neighbours of one kind joined."""
    groups = itertools.groupby((p for p in parts if p.kind != "call"), key=lambda part: part.kind)
    return [(kind, "".join(part.text for part in group)) for kind, group in groups]


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_a_call_is_read_with_its_types(style):
    text = written("run", ARGUMENTS, style) + "\n" + written("stop", {}, style)
    reply = parse_reply("<think>now {</think>" + text, TOOLS, tool_format(style))
    assert reply.errors == []
    assert [(call.name, call.arguments) for call in reply.calls] == [("run", ARGUMENTS), ("stop", {})]
    assert reply.content == ""


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_parallel_calls_come_out_one_after_the_other_while_the_reply_goes_on(style):
    first, second = written("run", ARGUMENTS, style), written("stop", {}, style)
    reader = ReplyReader(tool_format(style), schemas={"run": SCHEMA})
    (call,) = [part for part in reader.feed(first + "\n" + second[:9]) if part.kind == "call"]
    assert (call.call.name, call.call.arguments, call.text) == ("run", ARGUMENTS, first)
    (call,) = [part for part in [*reader.feed(second[9:]), *reader.finish()] if part.kind == "call"]
    assert call.call.name == "stop"


def test_text_goes_out_before_a_call_and_the_beginning_of_a_tag_is_held_back():
    reader = ReplyReader()
    assert reader.feed("Let me <") == [ReplyPart("text", "Let me ")]
    assert reader.feed("b>look</b> <tool") == [ReplyPart("text", "<b>look</b> ")]
    assert reader.feed("_call>") == []
    assert [part.text for part in reader.finish()] == ["<tool_call>"]


@pytest.mark.parametrize(("text", "thinking"), [("<think>\nhm</think>\n\nyes", False), ("hm</think>yes", True)])
def test_reasoning_is_told_apart_while_it_comes(text, thinking):
    parts = read(text, "hermes", thinking=thinking)
    assert merged(parts) == [("reasoning", text[: text.index("</think>") + 8]), ("text", text[text.index("</think>") + 8 :])]


def test_reasoning_that_does_not_end_is_all_there_is():
    assert merged(read("<think>on and on <tool_call>", "hermes")) == [("reasoning", "<think>on and on <tool_call>")]


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>{not json}</tool_call> and more",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "run"}</tool_call>',
        '<tool_call>{"name": "run", "arguments": {"a": 1',
    ],
)
def test_what_cannot_be_read_as_a_call_is_text(broken):
    assert merged(read("well " + broken, "hermes")) == [("text", "well " + broken)]


def test_an_answer_that_is_json_is_no_llama_call():
    for answer in ('{"answer": 1}', 'See {"name": "run", "parameters": {}}', '{"name": "only"}', "{"):
        assert merged(read(answer, "llama3_json")) == [("text", answer)]
    assert parse_reply('{"answer": 1}', TOOLS, tool_format("llama3_json")).content == '{"answer": 1}'


def test_the_python_tag_begins_a_llama_call_anywhere():
    (call,) = parse_reply('Sure.<|python_tag|>{"name": "stop", "parameters": {}}', TOOLS, tool_format("llama3_json")).calls
    assert call.name == "stop"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call><function=run><parameter=command>ls</parameter>", "not closed"),
        ("<tool_call><function=run>stray</function></tool_call>", "outside its <parameter"),
        ("<tool_call>run</tool_call>", "does not hold one <function"),
        ("<tool_call><function=run><parameter=lines>many</parameter></function></tool_call>", "must be of type integer"),
    ],
)
def test_a_model_is_told_what_is_wrong_with_its_xml(text, error):
    reply = parse_reply(text, TOOLS, tool_format("qwen3_coder"))
    assert reply.calls == []
    assert error in reply.errors[0]


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="'yaml'; there are hermes"):
        tool_format("yaml")
    assert tool_format("").name == "hermes"


def test_no_tools_need_no_description():
    assert describe_tools([]) == ""


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "{",
            "}",
            '"name"',
            ":",
            "<|python_tag|>",
            "<function=run>",
            " ",
            "\n",
        ]
        + ["</function>", "<parameter=lines>", "</parameter>", "3", "é", ";", "<", written("stop", {}, "hermes")]
        + [written("run", ARGUMENTS, style) for style in TOOL_FORMATS]
    ),
    max_size=12,
).map("".join)


@given(FRAGMENTS, st.sampled_from(TOOL_FORMATS), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
@settings(deadline=None)
def test_however_a_reply_comes_nothing_is_lost_and_the_same_is_found(text, style, pieces, thinking):
    parts = read(text, style, pieces=pieces, thinking=thinking)
    whole = read(text, style, pieces=[max(1, len(text))], thinking=thinking)
    assert "".join(part.text for part in parts) == text
    assert [part for part in parts if part.kind == "call"] == [part for part in whole if part.kind == "call"]
    assert merged(parts) == merged(whole)
