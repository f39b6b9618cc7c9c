"""The script of the demo's fallback: it does sums, calls the python tool, and is wrong now and then, as a model is."""

from __future__ import annotations

import ast
import json
import operator
import re
from functools import partial

from rollouts.llm.scripted.script import Request, Script

_SUM = re.compile(r"(-?\d+)\s*([-+*×x])\s*(-?\d+)")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "×": operator.mul, "x": operator.mul}
_EXPRESSION = re.compile(r"[\d(][\d\s.+*/()-]*[\d)]|\d")
_PYTHON_TOOL = re.compile(r'"name":\s*"python"')


def solver(accuracy: float) -> Script:
    """A script that is right about sums with probability `accuracy`."""
    return partial(_solve, accuracy=accuracy)


def _solve(request: Request, accuracy: float) -> str:
    question = next((m["content"] for m in request.messages if m["role"] == "user"), "")
    right = request.rng.random() < accuracy
    last = request.messages[-1]
    if last["role"] == "tool" or "<tool_response>" in last["content"]:
        result = re.sub(r"</?tool_response>", "", last["content"]).strip().splitlines() or ["0"]
        return f"The program printed the result, so the answer is \\boxed{{{result[-1] if right else _slip(request)}}}."
    if any(_PYTHON_TOOL.search(m["content"]) for m in request.messages):
        return _python_call(question)
    found = _SUM.search(question)
    if found is None:
        return f"I would guess \\boxed{{{_slip(request)}}}."
    left, sign, other = found.groups()
    value = _OPERATORS[sign](int(left), int(other))
    return str(value if right else value + request.rng.choice((-10, -1, 1, 10)))


def _python_call(question: str) -> str:
    """Compute the longest arithmetic expression of the question; a model of no understanding does no better."""
    expressions = [text for text in _EXPRESSION.findall(question) if _is_python(text)]
    code = f"print({max(expressions, key=len, default='0')})"
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    return f"I will compute this.\n<tool_call>\n{call}\n</tool_call>"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return "**" not in text  # one number of the question as another's power may never end


def _slip(request: Request) -> int:
    return request.rng.randint(0, 100)
