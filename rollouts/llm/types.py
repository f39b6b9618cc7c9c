"""Values that pass between the model client, the agent loop and the store. No Django."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict


class SegmentCause(enum.StrEnum):
    """Why a segment began instead of going on with an earlier one."""

    START = "start"  # the first call
    TEMPLATE = "template"  # the chat template does not let the sampled reply be continued as it was sampled
    CUT = "cut"  # the reply before did not end its turn (token limit, stop string)
    NO_IDS = "no_ids"  # the server gave no ids for the reply before
    EDITED = "edited"  # the agent changed, dropped or summarised earlier messages (compaction)
    SUBAGENT = "subagent"  # a conversation of its own, beside the others
    SIBLING = "sibling"  # another sample (n > 1) or another try from the same prompt


FinishReason = Literal["stop", "length", "content_filter", "abort"]


class ChatMessage(TypedDict):
    """A message as a chat template sees it.

    `parts` are the content parts of a message that is more than one text, in order: `{"type": "text", "text"}` as OpenAI's API
    writes them, and `{"type": "picture", "picture": Picture}` (`rollouts.llm.messages` sends it as OpenAI's `image_url`).
    `content` is then what of it is text, for people to read. `tool_calls` are OpenAI's, their arguments as objects.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: NotRequired[str]
    parts: NotRequired[list[dict[str, Any]]]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True)
class Sampling:
    """How to sample one reply. `max_tokens` bounds one turn and is further bounded by the model's context."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    seed: int | None = None  # sent only where somebody asked for it


class VersionSpan(NamedTuple):
    """`tokens` sampled ids in a row that came from the weights of `version`."""

    version: int
    tokens: int


class PlacedPicture(NamedTuple):
    """A picture among ids: the model sees it in place of the `length` ids from `offset`. `digest` is its data's SHA-256."""

    offset: int
    length: int
    digest: str

    @property
    def end(self) -> int:
        """The index after its last id."""
        return self.offset + self.length

    def moved(self, by: int) -> PlacedPicture:
        """The same with `by` more ids before it."""
        return self._replace(offset=self.offset + by)


class TokenPrompt(NamedTuple):
    """Ids to sample from, or to put after others. `placed` are in the order of their offsets, which count from the first id."""

    ids: list[int]
    placed: tuple[PlacedPicture, ...] = ()

    def followed_by(self, more: TokenPrompt) -> TokenPrompt:
        """Both, one after the other."""
        return TokenPrompt(self.ids + more.ids, (*self.placed, *(place.moved(len(self.ids)) for place in more.placed)))

    def since(self, start: int) -> TokenPrompt:
        """What comes after the first `start` ids, among which no picture may stand."""
        return TokenPrompt(self.ids[start:], tuple(place.moved(-start) for place in self.placed))


NOTHING = TokenPrompt([])


class Piece(NamedTuple):
    """What was sampled since the last piece, of a reply that is sent as it is sampled.

    `text` may lag behind `token_ids`: a character is sent once all of its bytes are there.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None  # as in `Completion`, of this piece alone


@dataclass(frozen=True)
class ServerAddress:
    """Where a rollout's model calls go and what they are stamped with.

    `features` are what the probe found: of `rollouts.llm.capabilities.Feature`. `tokenizer` is the directory of the model's own
    tokenizer files on this machine, empty where prompts are rendered by the server. `tool_format` names how this model writes
    tool calls (`rollouts.llm.toolcalls`).
    """

    url: str  # root of the server, without /v1
    model: str
    policy: str
    policy_version: int
    max_model_len: int
    server_id: str = ""
    api_key: str = field(default="", repr=False)
    engine: str = "vllm"
    features: frozenset[str] = frozenset()
    tokenizer: str = ""
    tool_format: str = ""
    picture_id: int | None = None  # stands for one picture in what is sent, until the server expands it; None: it takes none


@dataclass(frozen=True)
class Completion:
    """What came back from one model call.

    `token_ids` are the ids as sampled, an end-of-turn id included, and empty when the server gives no ids; `logprobs` has one
    natural-log value for each of them, or is None when the server left out even one (never zeros). `spans` says which weights
    sampled them, as far as the server tells; else it is empty, and the version of the address holds for all.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    latency: float  # seconds
    spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True)
class ModelCallRecord:
    """One model call as stored.

    The prompt is kept as what it adds to its segment: the prompt ids of a call are the concatenation, over the earlier calls of
    the same segment, of `context_ids + sampled_ids`, followed by this call's own `context_ids`. `buffer.reconstruct` does this,
    and `buffer.validate` checks it. `sampled_ids` is empty when the server gave none (text-only).

    Segments may be continued in any order: an agent that has sub-agents goes on in several. `opened_by` says, on the first call
    of a segment, why it was begun, and `parent_segment` from which one it branched off. `policy_version` is that of the first
    sampled id and `policy_version_last` that of the last; `version_spans` are all of them, empty when only these two are known.
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
    policy_version_last: int | None = None  # None: as `policy_version`
    version_spans: tuple[VersionSpan, ...] = ()
    opened_by: str = ""  # a SegmentCause on the first call of a segment
    parent_segment: int | None = None
    dialect: str = ""  # how an agent asked for it through the gateway; empty for the shipped loop

    conversation_key: str = ""  # by which the gateway finds what goes on from here (`rollouts.gateway.branches`)
    placed: tuple[PlacedPicture, ...] = ()  # pictures among `context_ids`

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled which of `sampled_ids`."""
        return self.version_spans or (VersionSpan(self.policy_version, len(self.sampled_ids)),)


@dataclass(frozen=True)
class ToolCallRequest:
    """A tool call parsed from sampled text."""

    name: str
    arguments: dict[str, Any]
    raw: str
