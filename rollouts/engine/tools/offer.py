"""How tools are offered to a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollouts.engine.tools.base import Tool, schema_of
from rollouts.llm import toolformats

_NULL = {"type": "null"}


def describe_tools(tools: Sequence[Tool]) -> str:
    """The section of a system prompt that offers these tools, in the Hermes convention; empty when there are none.

    We write it rather than the chat template, because templates differ in how they do and some ignore tools altogether.
    """
    return toolformats.describe_tools([{"type": "function", "function": _function(tool)} for tool in tools])


def _function(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": _plain(schema_of(tool.arguments))}


def _plain(schema: Any) -> Any:
    """Without what costs tokens in every prompt and says nothing: titles, and that an optional argument may be null."""
    if not isinstance(schema, dict):
        return schema
    if _NULL in schema.get("anyOf", ()):
        (schema_given,) = (each for each in schema["anyOf"] if each != _NULL)
        schema = {**schema_given, **{key: value for key, value in schema.items() if key not in ("anyOf", "default")}}
    return {
        key: {name: _plain(sub) for name, sub in value.items()} if key == "properties" else _plain(value)
        for key, value in schema.items()
        if key not in ("title", "additionalProperties") and not (key == "description" and "properties" in schema)
    }
