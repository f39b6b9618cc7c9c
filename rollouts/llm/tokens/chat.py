"""One chat template: messages in, the text of a prompt out, as vLLM and transformers do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes

from rollouts.llm.errors import ModelError
from rollouts.llm.tokens.sandbox import ChatEnvironment
from rollouts.llm.turns import Tools
from rollouts.llm.types import ChatMessage

_ENVIRONMENT = ChatEnvironment()
_CONTENT = "content"


class ChatTemplate:
    """Compiled once. Raises `jinja2.TemplateError` when `source` is no template."""

    def __init__(self, source: str) -> None:
        tree = _ENVIRONMENT.parse(source)
        self._takes_parts = _loops_over_content(tree)
        self._template = _ENVIRONMENT.compiled(tree)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Tools | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of a prompt. Raises `ModelError` of status 400 when the template refuses the messages."""
        given = {
            **variables,
            "messages": [self._as_seen(message) for message in messages],
            "tools": [_tool_as_seen(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _ENVIRONMENT.render(self._template, given)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as exc:
            raise ModelError(f"the chat template refuses the messages: {exc}", retryable=False, status=400) from exc

    def _as_seen(self, message: ChatMessage) -> dict[str, Any]:
        texts = [part["text"] for part in message["parts"]] if "parts" in message else [message["content"]]
        seen: dict[str, Any] = {"role": message["role"], _CONTENT: "\n".join(texts)}
        if self._takes_parts and message["role"] != "tool":
            seen[_CONTENT] = [{"type": "text", "text": text} for text in texts]
        if message["role"] == "assistant":
            if calls := message.get("tool_calls"):
                seen["tool_calls"] = [
                    {"id": call.get("id", ""), "type": "function", "function": dict(call["function"])} for call in calls
                ]
            if reasoning := message.get("reasoning_content"):
                seen |= {"reasoning": reasoning, "reasoning_content": reasoning, "thinking": reasoning}
        elif message["role"] == "tool" and "tool_call_id" in message:
            seen["tool_call_id"] = message["tool_call_id"]
        if "name" in message:
            seen["name"] = message["name"]
        return seen


def _tool_as_seen(tool: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM fills in what may be left out, and leaves out what is not OpenAI's."""
    function = tool["function"]
    seen = {"name": function["name"], "description": function.get("description"), "parameters": function.get("parameters")}
    if function.get("strict") is not None:
        seen["strict"] = function["strict"]
    return {"type": "function", "function": seen}


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template wants the content of messages as a list of parts. vLLM decides it by the same loops."""
    messages = _names_of_messages(tree)
    each = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _source(loop.iter) in messages
    }
    contents = {(name, _CONTENT) for name in each}
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        parameters = {
            name
            for call in tree.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
            for name, argument in _arguments(macro, call)
            if _source(argument) in contents
        }
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if _source(loop.iter) in parameters:
                return True
    return any(
        _source(loop.iter) in contents or (id(loop) not in in_macros and _source(loop.iter) == _CONTENT)
        for loop in tree.find_all(nodes.For)
    )


def _arguments(macro: nodes.Macro, call: nodes.Call) -> list[tuple[str, nodes.Node]]:
    """What a call passes, by the macro's names."""
    placed = [(parameter.name, argument) for parameter, argument in zip(macro.args, call.args, strict=False)]
    return [*placed, *((keyword.key, keyword.value) for keyword in call.kwargs)]


def _names_of_messages(tree: nodes.Template) -> set[Any]:
    """The variables that hold the messages or a slice of them."""
    found: set[Any] = {"messages"}
    assignments = [a for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)]
    while more := {a.target.name for a in assignments if _source(a.node) in found} - found:  # type: ignore[attr-defined]
        found |= more
    return found


def _source(node: nodes.Node | None) -> str | tuple[str, str] | None:
    """What an expression takes its items from: a variable, or (variable, attribute); filters and slices aside."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return node.node.name, node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name) and isinstance(node.arg, nodes.Const):
        return node.node.name, str(node.arg.value)
    return None
