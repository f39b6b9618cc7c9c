"""Values that pass between the model client, the agent loop and the store. No Django."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "content_filter", "abort"]


class ChatMessage(TypedDict):
    """A message as a chat template sees it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True)
class Sampling:
    """How to sample one reply. `max_tokens` bounds one turn and is further bounded by the model's context."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerAddress:
    """Where a rollout's model calls go and what they are stamped with."""

    url: str  # root of the server, without /v1
    model: str
    policy: str
    policy_version: int
    max_model_len: int
    server_id: str = ""
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Completion:
    """What came back from one model call.

    `token_ids` are the ids as sampled, an end-of-turn id included, and empty when the server gives no ids; `logprobs` has one
    natural-log value for each of them, or is None when the server left out even one (never zeros).
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    latency: float  # seconds


@dataclass(frozen=True)
class Capabilities:
    """What a server turned out to offer when it was probed.

    `max_model_len` is the first model's, None when the server does not tell. `tokenize` means that `/tokenize` renders chat
    messages to ids; without it this platform's own agent loop cannot use the server.
    """

    models: tuple[str, ...]
    max_model_len: int | None
    returns_token_ids: bool
    returns_logprobs: bool
    tokenize: bool
    version: str


@dataclass(frozen=True)
class ModelCallRecord:
    """One model call as stored.

    The prompt is kept as what it adds to its segment: the prompt ids of a call are the concatenation, over the earlier calls of
    the same segment, of `context_ids + sampled_ids`, followed by this call's own `context_ids`. `buffer.reconstruct` does this,
    and `buffer.validate` checks it. `sampled_ids` is empty when the server gave none (text-only).
    """

    turn: int
    segment: int
    context_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float] | None
    text: str
    finish_reason: str
    prompt_tokens: int
    policy: str
    policy_version: int
    server_id: str
    latency: float
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCallRequest:
    """A tool call parsed from sampled text."""

    name: str
    arguments: dict[str, Any]
    raw: str
