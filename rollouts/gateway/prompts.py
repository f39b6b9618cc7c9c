"""How an agent's tools and its history of calls reach the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.gateway.requests import FunctionTool
from rollouts.llm.toolformats import CLOSE, OPEN, describe_tools
from rollouts.llm.types import ChatMessage


def in_words(messages: Sequence[ChatMessage], tools: Sequence[FunctionTool]) -> list[ChatMessage]:
    """For a template without a tools section: tools in the system message and calls in the replies' text."""
    told = [_with_calls_in_text(message) for message in messages]
    if not tools:
        return told
    offer = describe_tools([tool.described() for tool in tools])
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{offer}"}, *told[1:]]
    return [{"role": "system", "content": offer}, *told]


def _with_calls_in_text(message: ChatMessage) -> ChatMessage:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    texts += [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    return {"role": "assistant", "content": "\n".join(texts)}
