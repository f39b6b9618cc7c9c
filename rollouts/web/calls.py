"""How the arguments of a tool call are shown: as a person would type them, and as JSON where that would leave something out."""

from __future__ import annotations

import json
from typing import Any

from .text import plain

_PROGRAMS = ("command", "code")
_REMOVED, _ADDED = ("old_str",), ("file_text", "new_str")


def shown_call(arguments: dict[str, Any]) -> str:
    """The one string argument as it is; a program with its options below it; an edit as what it removes and adds."""
    if len(arguments) == 1 and isinstance(only := next(iter(arguments.values())), str):
        return plain(only)
    rest = dict(arguments)
    command, path = rest.pop("command", None), rest.pop("path", None)
    if isinstance(command, str) and isinstance(path, str):
        lines = [f"{command} {path}"]
        for names, sign in ((_REMOVED, "-"), (_ADDED, "+")):
            texts = [rest.pop(name) for name in names if isinstance(rest.get(name), str)]
            lines += [f"{sign} {line}" for text in texts for line in text.splitlines()]
        return plain("\n".join([*lines, *_options(rest)]))
    for name in _PROGRAMS:
        if isinstance(program := arguments.get(name), str):
            return plain("\n".join([program, *_options({key: arguments[key] for key in arguments if key != name})]))
    return json.dumps(arguments, indent=2, ensure_ascii=False, default=str)


def _options(rest: dict[str, Any]) -> list[str]:
    return [f"# {name}: {json.dumps(value, ensure_ascii=False, default=str)}" for name, value in rest.items()]
