"""Taking sampled text apart: what it thought, what it says, and which tools it calls."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from rollouts.gateway.replies import CallOut, Ending, Reply
from rollouts.gateway.requests import FunctionTool, ModelRequest
from rollouts.llm.toolcalls import parse_reply
from rollouts.llm.turns import REASONING_END
from rollouts.llm.types import ModelCallRecord

_REASONING_START = "<think>"


def read_reply(record: ModelCallRecord, request: ModelRequest) -> Reply:
    """The reply of a call. Calls that are written wrongly, or of unknown tools, stay text for the agent to judge."""
    reasoning, visible = split_reasoning(record.text)
    calls: tuple[CallOut, ...] = ()
    if request.tools and request.tool_choice.mode != "none":
        tools: Mapping[str, FunctionTool] = {tool.name: tool for tool in request.tools}
        parsed = parse_reply(visible, tools)
        if parsed.calls and not parsed.errors:
            visible = parsed.content
            calls = tuple(
                CallOut(f"call_{secrets.token_hex(12)}", call.name, call.arguments)
                for call in parsed.calls[: None if request.parallel_calls else 1]
            )
    ending: Ending = "length"
    if record.finish_reason in ("stop", "content_filter"):
        ending = "content_filter" if record.finish_reason == "content_filter" else "tool_calls" if calls else "stop"
    return Reply(visible, reasoning, calls, ending, record)


def split_reasoning(text: str) -> tuple[str, str]:
    """What was thought, without its tags, and what was said. The opening tag may have been part of the prompt."""
    thought, tag, said = text.partition(REASONING_END)
    if tag:
        return thought.removeprefix(_REASONING_START).strip(), said.lstrip("\n")
    if text.startswith(_REASONING_START):
        return text.removeprefix(_REASONING_START).strip(), ""
    return "", text
