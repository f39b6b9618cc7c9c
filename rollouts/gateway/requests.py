"""What an agent asks for, whichever API it speaks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollouts.llm.types import ChatMessage, Sampling

_LONGEST_TOKEN = 128  # characters, on average over a prompt; single ones of white space are longer


class FunctionTool(NamedTuple):
    """A tool that the agent offers to the model. `parameters` is the JSON Schema of the arguments object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def code_argument(self) -> None:
        """Fenced code never calls an agent's tool: it could not tell that from text."""
        return None

    def described(self) -> dict[str, Any]:
        """As chat templates take it: OpenAI's shape."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Wishes:
    """The agent's own sampling settings; None where it has none."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def applied(self, default: Sampling) -> Sampling:
        """What is really sampled with."""
        return Sampling(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_p=default.top_p if self.top_p is None else self.top_p,
            top_k=default.top_k if self.top_k is None else self.top_k,
            max_tokens=self.max_tokens or default.max_tokens,
            stop=self.stop or default.stop,
            seed=default.seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True)
class ModelRequest:
    """One call. A raw completion has a `prompt` (text or ids) instead of messages.

    `remember` are the messages that a later request may go on from by naming the `id` of this one.
    """

    dialect: str
    model: str
    messages: tuple[ChatMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[FunctionTool, ...] = ()
    may_call: bool = True  # tools: else the model is told of them, but what it writes is text
    parallel_calls: bool = True  # False: only the first call of a reply is given to the agent
    wishes: Wishes = field(default_factory=Wishes)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    remember: tuple[ChatMessage, ...] | None = None
    pictures_at: str = ""  # the field of its first picture; empty where it brings none
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def fewest_tokens(self) -> int:
        """A lower bound of its prompt's length, for any tokenizer there is."""
        if self.prompt is not None and not isinstance(self.prompt, str):
            return len(self.prompt)
        characters = len(self.prompt or "") + sum(len(message["content"]) for message in self.messages)
        return characters // _LONGEST_TOKEN
