"""What model servers offer, in words."""

from __future__ import annotations

from typing import NamedTuple

from rollouts.llm.capabilities import Feature
from rollouts.models import LLMServer

_WORDS = {
    Feature.TOKEN_IDS: "token ids",
    Feature.LOGPROBS: "logprobs",
    Feature.ID_PROMPTS: "prompts as ids",
    Feature.TOKENIZE: "its own chat template",
    Feature.GENERATE: "the weights of each token",
    Feature.CHAT_TOOLS: "its own parser of tool calls",
    Feature.PROMPT_LOGPROBS: "logprobs of prompts",
    Feature.PICTURES: "pictures in prompts",
    Feature.METRICS: "metrics",
    Feature.PAUSE: "pausing",
    Feature.RELOAD_WEIGHTS: "reloading weights",
    Feature.WEIGHT_VERSION: "labels of weights",
    Feature.LORA: "LoRA adapters",
    Feature.SLEEP: "sleeping",
}


class Abilities(NamedTuple):
    """What its last registration found that a server offers, and what it does not."""

    offered: list[str]
    missing: list[str]


def abilities_of(server: LLMServer) -> Abilities:
    """In the same order for all servers."""
    found = server.capabilities.get("features", ())
    return Abilities(
        [words for feature, words in _WORDS.items() if feature in found],
        [words for feature, words in _WORDS.items() if feature not in found],
    )
