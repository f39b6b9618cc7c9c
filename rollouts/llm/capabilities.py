"""What model servers can do beyond the least that is asked of them. Found by a probe, stored with the server."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Feature(enum.StrEnum):
    """One thing a server offers."""

    TOKEN_IDS = "token_ids"  # noqa: S105 - no password; returns the ids it sampled
    LOGPROBS = "logprobs"  # one for each sampled id
    ID_PROMPTS = "id_prompts"  # takes prompts as ids
    TOKENIZE = "tokenize"  # renders chat messages to ids with its own template
    GENERATE = "generate"  # vLLM's /inference/v1/generate, which tells the weight version of each span
    CHAT_TOOLS = "chat_tools"  # its own tool parser answers /v1/chat/completions with tool calls
    PROMPT_LOGPROBS = "prompt_logprobs"
    METRICS = "metrics"  # vLLM's /metrics
    PAUSE = "pause"  # /pause and /resume, modes abort, wait and keep
    RELOAD_WEIGHTS = "reload_weights"  # /collective_rpc reload_weights
    WEIGHT_VERSION = "weight_version"  # /weight_info and /update_weight_version
    LORA = "lora"  # /v1/load_lora_adapter
    SLEEP = "sleep"  # /sleep and /wake_up
    PICTURES = "pictures"  # takes pictures beside ids, and returns the ids that it has expanded them to


@dataclass(frozen=True)
class Capabilities:
    """What a probe found of `model`, one of the `models` that the server serves.

    `max_model_len` is None when the server does not tell. `version` is the server's own, `weight_version` what it says of its
    weights; both are empty when it says nothing. `picture_id` is the id that stands for a picture in what is sent to it, None
    where it takes none.
    """

    models: tuple[str, ...]
    model: str
    engine: str  # vllm, sglang or openai
    max_model_len: int | None
    features: frozenset[Feature]
    version: str
    weight_version: str
    picture_id: int | None = None
