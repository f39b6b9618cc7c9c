"""Logprobs in the three forms in which vLLM writes them, and those of a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rollouts.llm.scripted.sequences import Choice, Request, fingerprint, logprob
from rollouts.llm.scripted.tokenizer import Tokenizer

Json = dict[str, Any]


class Probabilities:
    """Under the given weights."""

    def __init__(self, tokenizer: Tokenizer, weights: str) -> None:
        self._tokenizer = tokenizer
        self._weights = weights

    def by_array(self, choice: Choice, start: int, alternatives: int) -> Json:
        """As /v1/completions writes them: parallel arrays."""
        tokens = [self._text(token) for token in choice.token_ids[start:]]
        values = choice.logprobs[start:]
        offset = sum(len(self._text(token)) for token in choice.token_ids[:start])
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        top = [
            {text: value}
            | {self._text(other): other_value for other, other_value in self._others(choice, number, alternatives)}
            for number, (text, value) in enumerate(zip(tokens, values, strict=True), start)
        ]
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": top}

    def by_token(self, choice: Choice, start: int, top: int) -> Iterator[Json]:
        """As /v1/chat/completions writes them: an object for each token, with `top` candidates, itself the first."""
        for number in range(start, len(choice.token_ids)):
            chosen = self._entry(choice.token_ids[number], _floored(choice.logprobs[number]))
            others = [self._entry(*other) for other in self._others(choice, number, top - 1)]
            yield chosen | {"top_logprobs": [chosen, *others] if top else []}

    def by_id(self, choice: Choice, start: int, alternatives: int) -> Iterator[Json]:
        """As the generate endpoint writes them: ids, no text."""
        for number in range(start, len(choice.token_ids)):
            pairs = [(choice.token_ids[number], _floored(choice.logprobs[number])), *self._others(choice, number, alternatives)]
            entries = [{"token_id": token, "logprob": value, "rank": 1} for token, value in pairs]
            yield entries[0] | {"top_logprobs": entries}

    def of_prompt(self, request: Request, alternatives: int) -> list[Json | None]:
        """For each id, itself and others by id; None for the first, which nothing comes before."""
        found: list[Json | None] = [None]
        before = fingerprint(request.seen[:1])
        for token, seen in zip(request.prompt_ids[1:], request.seen[1:], strict=True):
            candidates = [token, *((token + step) % self._tokenizer.size for step in range(1, alternatives + 1))]
            found.append(
                {
                    str(candidate): {
                        "logprob": logprob(self._weights, before, candidate),
                        "rank": 1,
                        "decoded_token": self._text(candidate),
                    }
                    for candidate in candidates
                }
            )
            before = fingerprint([seen], before)
        return found

    def _others(self, choice: Choice, number: int, count: int) -> Iterator[tuple[int, float]]:
        for step in range(1, count + 1):
            token = (choice.token_ids[number] + step) % self._tokenizer.size
            yield token, logprob(self._weights, choice.contexts[number], token)

    def _entry(self, token: int, value: float | None) -> Json:
        text = self._text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)


def _floored(value: float | None) -> float | None:
    """These two endpoints write a number where there is none."""
    return -9999.0 if value is not None and math.isnan(value) else value
