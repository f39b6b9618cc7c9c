"""The token view of one turn."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from rollouts.models import ModelCall, Rollout

# Upper bounds of the probability of the buckets that colour a token; the last bucket is everything above.
BUCKETS = (0.01, 0.1, 0.5, 0.9)
LOWEST_SHOWN = 5


class Token(NamedTuple):
    """A sampled token. Without logprobs, `logprob` is None and the bucket empty."""

    position: int
    id: int
    logprob: float | None
    bucket: str

    @property
    def percent(self) -> float | None:
        return None if self.logprob is None else 100 * math.exp(self.logprob)


class Chunk(NamedTuple):
    """Sampled tokens in a row that came from the weights of one version; None when the server does not tell which."""

    version: int | None
    tokens: list[Token]


class Stretch(NamedTuple):
    """Ids in a row of a prompt: of text, or those that stand for one picture, of which `picture` is the digest."""

    ids: list[int]
    picture: str = ""


class TurnTokens(NamedTuple):
    """One turn's tokens: the ids its prompt added (mask 0), and what was sampled (mask 1)."""

    call: ModelCall
    context: list[Stretch]
    sampled: list[Token]

    @property
    def context_tokens(self) -> int:
        return len(self.call.context_ids)

    @property
    def pictures(self) -> int:
        """How many the prompt added."""
        return len(self.call.placed)

    @property
    def chunks(self) -> list[Chunk]:
        """What was sampled, by version."""
        if not self.call.version_spans:
            last = self.call.policy_version_last
            return [Chunk(self.call.policy_version if last in (None, self.call.policy_version) else None, self.sampled)]
        starts = itertools.accumulate((tokens for _, tokens in self.call.version_spans), initial=0)
        places = zip(self.call.version_spans, starts, strict=False)
        return [Chunk(version, self.sampled[start : start + tokens]) for (version, tokens), start in places]

    @property
    def lowest(self) -> list[Token]:
        """The least likely sampled tokens."""
        known = [token for token in self.sampled if token.logprob is not None]
        return sorted(known, key=lambda token: token.logprob or 0.0)[:LOWEST_SHOWN]

    @property
    def mean_logprob(self) -> float | None:
        known = [token.logprob for token in self.sampled if token.logprob is not None]
        return sum(known) / len(known) if known else None


def turn_tokens(rollout: Rollout, turn: int) -> TurnTokens:
    """Read one model call of the newest attempt with its arrays."""
    call = ModelCall.objects.get(rollout=rollout, attempt=rollout.attempt, turn=turn)
    logprobs = call.logprobs if call.logprobs is not None else [None] * len(call.sampled_ids)
    pairs = enumerate(zip(call.sampled_ids, logprobs, strict=True))
    sampled = [Token(i, token_id, logprob, _bucket(logprob)) for i, (token_id, logprob) in pairs]
    return TurnTokens(call, _stretches(call), sampled)


def _stretches(call: ModelCall) -> list[Stretch]:
    found, position = [], 0
    for offset, length, digest in call.placed:
        found.append(Stretch(call.context_ids[position:offset]))
        position = offset + length
        found.append(Stretch(call.context_ids[offset:position], digest))
    found.append(Stretch(call.context_ids[position:]))
    return [stretch for stretch in found if stretch.ids]


def _bucket(logprob: float | None) -> str:
    if logprob is None:
        return ""
    probability = math.exp(logprob)
    return f"p{next((i for i, bound in enumerate(BUCKETS) if probability < bound), len(BUCKETS))}"
