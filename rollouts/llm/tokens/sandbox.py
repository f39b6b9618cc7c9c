"""The Jinja that chat templates are written for, as transformers sets it up, with bounds on what a template may use up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0  # for one render; a thousand messages take some 20 ms
MAX_CHARACTERS = 64 * 1024 * 1024  # of a prompt, and of any text on the way to it


class TemplateLimit(TemplateError):
    """The template took too long or made too much."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates; a render may run in any thread.

    The sandbox keeps a template from Python. The bounds keep it from the process's time and memory, since a template comes with
    a model that somebody downloaded: every loop step and call looks at the clock, and texts and lists do not grow for ever.
    """

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._deadline = threading.local()

    def compiled(self, tree: nodes.Template) -> Template:
        """A template of what `parse` made of its source. Changes `tree`."""
        return Template.from_code(self, self.compile(_Bounds().visit(tree)), self.make_globals(None))

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Raises `TemplateError`, among them `TemplateLimit`, and whatever an expression of the template raises."""
        self._deadline.at = time.monotonic() + MAX_SECONDS
        pieces, length = [], 0
        for piece in template.generate(variables):
            length += len(piece)
            _bound(length)
            pieces.append(piece)
        return "".join(pieces)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._look_at_the_clock()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateLimit("a chat template may not raise to a power")
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _bound(len(left) + len(right))
        elif operator == "*":
            for factor, repeated in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and isinstance(factor, int):
                    _bound(len(repeated) * factor)
        return super().call_binop(context, operator, left, right)

    def bounded_steps(self, items: Iterable[Any]) -> Iterator[Any]:
        """What a template's loops go through."""
        for item in items:
            self._look_at_the_clock()
            yield item

    def bounded_text(self, *parts: Any) -> str:
        """What a template's `~` makes."""
        texts = [str(part) for part in parts]
        _bound(sum(map(len, texts)))
        return "".join(texts)

    def _look_at_the_clock(self) -> None:
        if time.monotonic() > self._deadline.at:
            raise TemplateLimit(f"the chat template did not end within {MAX_SECONDS:g} s")


class _Bounds(NodeTransformer):
    """Leads loops and joined texts through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _ask_environment("bounded_steps", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _ask_environment("bounded_text", *node.nodes)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks replies for those who tokenise text; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        # A call block, as in transformers: what it sets stays inside, and nothing else about it changes.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return str(caller())


def _ask_environment(method: str, *arguments: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


def _bound(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateLimit(f"the chat template makes more than {MAX_CHARACTERS} characters")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - as the server does, in its own time zone
