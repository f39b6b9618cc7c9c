"""What decides the replies: scripts, and the directives that a test writes into a user message."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollouts.llm.types import ChatMessage


@dataclass(frozen=True)
class Request:
    """What a script sees.

    `turn` counts from 1; `rng` is seeded by the server's seed, the prompt and how often it came; `weights` is what the server
    calls its weights; `pictures` are the data of those in the messages.
    """

    messages: Sequence[ChatMessage]
    turn: int
    rng: random.Random
    weights: str = "default"
    pictures: Sequence[bytes] = ()


@dataclass(frozen=True)
class Reply:
    """What the server does: answer `text` after `delay` seconds, or fail with `status`.

    `finish_reason` other than "stop" leaves out the end-of-turn id. `flaw` is one of "", "omit_logprob", "nan", "omit_ids".
    """

    text: str
    delay: float = 0.0
    status: int = 200
    finish_reason: str = "stop"
    flaw: str = ""


Script = Callable[[Request], str]


def echo(request: Request) -> str:
    """Repeat the last message, without its directives."""
    return _DIRECTIVE.sub("", request.messages[-1]["content"]).strip() or "(nothing)"


_DIRECTIVE = re.compile(
    r"\[\[(reply|weights|delay|fail|length|content_filter|abort|omit_logprob|omit_ids|nan)(\d*)(?::(.*?))?\]\]", re.DOTALL
)


def decide(request: Request, script: Script, occurrence: int) -> Reply:
    """The script's reply, changed by the directives in the user messages.

    `[[reply:TEXT]]` answers TEXT in the first turn. The others act in every turn: `[[weights]]` answers what the server calls
    its weights, `[[delay:SECONDS]]`, `[[fail:STATUS]]`, `[[fail:STATUS:N]]` (the first N times that the same prompt comes),
    `[[length]]`, `[[content_filter]]`, `[[abort]]` (after half of what is left), `[[omit_logprob]]`, `[[omit_ids]]`, `[[nan]]`.
    A number after the name limits any of them to that turn: `[[reply2:TEXT]]`. `occurrence` counts how often this prompt came
    before.
    """
    active: dict[str, str] = {}
    for message in request.messages:
        if message["role"] == "user":
            for name, number, argument in _DIRECTIVE.findall(message["content"]):
                turn = int(number) if number else 1 if name == "reply" else request.turn
                if turn == request.turn:
                    active[name] = argument
    text = active.get("reply", request.weights if "weights" in active else None)
    reply = Reply(script(request) if text is None else text)
    for name, argument in active.items():
        if name == "delay":
            reply = replace(reply, delay=float(argument))
        elif name == "fail":
            status, _, times = argument.partition(":")
            if not times or occurrence < int(times):
                reply = replace(reply, status=int(status))
        elif name in ("length", "content_filter", "abort"):
            reply = replace(reply, finish_reason=name)
        elif name not in ("reply", "weights"):
            reply = replace(reply, flaw=name)
    return reply
