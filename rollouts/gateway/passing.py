"""Servers that take no ids, such as plain OpenAI endpoints: messages are passed on, and the trajectory is text-only."""

from __future__ import annotations

import json
from typing import Any

from rollouts.gateway.dialects.openai_common import read_arguments
from rollouts.gateway.replies import CallOut, Told
from rollouts.gateway.requests import ModelRequest
from rollouts.llm.capabilities import Feature
from rollouts.llm.errors import ModelError
from rollouts.llm.messages import content_as_sent
from rollouts.llm.types import ChatMessage, Completion, FinishReason, Sampling, ServerAddress

_FINISH_REASONS: dict[Any, FinishReason] = {"length": "length", "content_filter": "content_filter"}


def takes_messages_only(server: ServerAddress) -> bool:
    """Whether this server was found to answer chats, but not prompts of ids that anybody can render."""
    can_render = server.tokenizer or Feature.TOKENIZE in server.features
    return Feature.CHAT_TOOLS in server.features and not (Feature.ID_PROMPTS in server.features and can_render)


def chat_body(request: ModelRequest, sampling: Sampling) -> dict[str, Any]:
    """The request for such a server, without what only some of them understand."""
    body: dict[str, Any] = {
        "messages": [_as_sent(message) for message in request.messages],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if request.tools:
        body["tools"] = [tool.described() for tool in request.tools]
        body["tool_choice"] = "auto" if request.may_call else "none"
    return body


def read_chat(answer: dict[str, Any], request: ModelRequest, latency: float) -> tuple[Completion, Told]:
    """The reply as it would have been sampled, and as the agent is told it. Raises `ModelError` when it is malformed."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        calls = tuple(CallOut(id_, f["name"], _as_object(f["arguments"])) for id_, f in functions)
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        raise ModelError("the chat answer has no choice with a message", retryable=True) from exc
    told = Told(content, message.get("reasoning_content") or "", calls if request.parallel_calls else calls[:1])
    written = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in calls]
    reason = _FINISH_REASONS.get(choice.get("finish_reason"), "stop")
    return Completion("\n".join(filter(None, [content, *written])), [], None, reason, latency), told


def _as_sent(message: ChatMessage) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message["role"], "content": content_as_sent(message)}
    if "tool_call_id" in message:
        sent["tool_call_id"] = message["tool_call_id"]
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [{**call, "function": _function(call["function"])} for call in calls]
    return sent


def _function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def _as_object(text: Any) -> dict[str, Any]:
    arguments = read_arguments(text)
    if not isinstance(arguments, dict):
        raise ModelError("the server's tool call has arguments that are not a JSON object", retryable=True)
    return arguments
