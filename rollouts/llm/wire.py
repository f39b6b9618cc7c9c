"""The two requests by which vLLM samples a reply to ids: what is sent, and how whole and streamed answers are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from rollouts.llm.answers import parse_completion
from rollouts.llm.capabilities import Feature
from rollouts.llm.errors import ModelError
from rollouts.llm.placed import check_seen, collapsed, content_parts
from rollouts.llm.types import Completion, Piece, Sampling, ServerAddress, TokenPrompt, VersionSpan
from sandboxes.protocol import Picture

# What vLLM's generate endpoint writes where it has no finite logprob.
_NO_LOGPROB = -9999.0


class Wire(Protocol):
    """One request to one endpoint."""

    path: str

    def body(self, server: ServerAddress, prompt: TokenPrompt, sampling: Sampling, max_tokens: int) -> dict[str, Any]:
        """What is sent."""
        ...

    def completion(self, answer: dict[str, Any], latency: float) -> Completion:
        """The reply of an answer. Raises `ModelError` when it is malformed or a logprob is not finite."""
        ...


def wire_of(server: ServerAddress, prompt: TokenPrompt, pictures: Mapping[str, Picture]) -> Wire:
    """The endpoint that tells most about the reply, for a prompt with these pictures.

    Raises `ModelError` when the prompt has pictures and the server takes none.
    """
    is_labelled = Feature.WEIGHT_VERSION in server.features
    if prompt.placed:
        if server.picture_id is None or Feature.GENERATE not in server.features:
            raise ModelError(f"{server.model} at {server.url} takes no pictures, and the prompt has some", retryable=True)
        return _GenerateSeeing(prompt, pictures, server.picture_id, is_labelled=is_labelled)
    return _Generate(is_labelled=is_labelled) if Feature.GENERATE in server.features else _Completions()


class _Completions:
    """`/v1/completions`."""

    path = "/v1/completions"

    def body(self, server: ServerAddress, prompt: TokenPrompt, sampling: Sampling, max_tokens: int) -> dict[str, Any]:
        body = {"model": server.model, "prompt": prompt.ids, "return_token_ids": True}
        return body | _sampling_body(sampling, max_tokens)

    def completion(self, answer: dict[str, Any], latency: float) -> Completion:
        return parse_completion(answer, latency)


class _Generate:
    """`/inference/v1/generate`, which also says which weights sampled which ids.

    `is_labelled`: the server was told a number for its weights, so that anything else means that it was restarted since.
    """

    path = "/inference/v1/generate"

    def __init__(self, *, is_labelled: bool) -> None:
        self._is_labelled = is_labelled

    def body(self, server: ServerAddress, prompt: TokenPrompt, sampling: Sampling, max_tokens: int) -> dict[str, Any]:
        return {
            "model": server.model,
            "token_ids": prompt.ids,
            "output_mode": "text",
            "sampling_params": _sampling_body(sampling, max_tokens),
        }

    def completion(self, answer: dict[str, Any], latency: float) -> Completion:
        choice = first_choice(answer)
        logprobs = choice.get("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        values = [_logprob(entry) for entry in entries] if isinstance(entries, list) else None
        same = {**choice, "logprobs": None if values is None else {"token_logprobs": values}}
        completion = parse_completion({"choices": [same]}, latency)
        told = choice.get("weight_versions") or []
        spans = _spans(told)
        if told and not spans and self._is_labelled:
            raise ModelError(
                f"the server says of its weights {told!r}: it was restarted, or others were loaded. "
                "Announce a version, or set its policy_version.",
                retryable=True,
            )
        return replace(completion, spans=spans)


class _GenerateSeeing(_Generate):
    """The same with pictures. The answer proves, by the ids that the model saw, that it saw the prompt as it is kept."""

    def __init__(self, prompt: TokenPrompt, pictures: Mapping[str, Picture], picture_id: int, *, is_labelled: bool) -> None:
        super().__init__(is_labelled=is_labelled)
        self._prompt, self._pictures, self._picture_id = prompt, pictures, picture_id
        self._is_proven = False

    def body(self, server: ServerAddress, prompt: TokenPrompt, sampling: Sampling, max_tokens: int) -> dict[str, Any]:
        sent = {
            "token_ids": collapsed(prompt, self._picture_id),
            "content_parts": content_parts(prompt, self._pictures),
            "return_token_ids": True,
        }
        return super().body(server, prompt, sampling, max_tokens) | sent

    def completion(self, answer: dict[str, Any], latency: float) -> Completion:
        if not self._is_proven:  # of a stream, only the first chunk tells it
            check_seen(answer.get("prompt_token_ids"), self._prompt)
            self._is_proven = True
        return super().completion(answer, latency)


def first_choice(answer: dict[str, Any]) -> dict[str, Any]:
    """Raises `ModelError` when there is none."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ModelError("the completion answer has no choice", retryable=True)
    found: dict[str, Any] = choices[0]
    return found


class Streamed:
    """Puts the chunks of a streamed answer together again."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._pieces: list[Piece] = []
        self._end: Completion | None = None

    def add(self, chunk: dict[str, Any]) -> Piece | None:
        """What a chunk brings; None for one without a choice (usage). Raises `ModelError` as `Wire.completion` does."""
        if chunk.get("choices") == []:
            return None
        choice = first_choice(chunk)
        ended = choice.get("finish_reason") is not None
        part = self._wire.completion(chunk if ended else {**chunk, "choices": [{**choice, "finish_reason": "stop"}]}, 0.0)
        if ended:
            self._end = part
        # A chunk may carry no ids (the last one, or text that was held back), and then it leaves out no logprob either.
        logprobs = part.logprobs if part.token_ids else []
        self._pieces.append(Piece(part.text, part.token_ids, logprobs))
        return self._pieces[-1]

    def completion(self, latency: float) -> Completion:
        """The whole reply; aborted, when no chunk has ended it."""
        logprobs: list[float] | None = []
        for piece in self._pieces:
            logprobs = None if logprobs is None or piece.logprobs is None else logprobs + piece.logprobs
        ids = [token for piece in self._pieces for token in piece.token_ids]
        return Completion(
            text="".join(piece.text for piece in self._pieces),
            token_ids=ids,
            logprobs=logprobs if ids else None,
            finish_reason=self._end.finish_reason if self._end else "abort",
            latency=latency,
            spans=self._end.spans if self._end else (),  # the last chunk tells those of the whole reply
        )


def _sampling_body(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # Said aloud, because a server otherwise takes them from the checkpoint's generation config and samples off-policy.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "skip_special_tokens": True,
    }
    if sampling.stop:
        # The ids of a stop string are returned in any case; the text must agree with them.
        body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body


def _logprob(entry: Any) -> float | None:
    value = entry.get("logprob") if isinstance(entry, dict) else None
    return None if value is None or (math.isfinite(value) and value <= _NO_LOGPROB) else float(value)


def _spans(versions: Any) -> tuple[VersionSpan, ...]:
    """The server's word on its weights; empty where that is not in numbers as this platform gives them out."""
    spans = []
    for version in versions if isinstance(versions, list) else ():
        label, start, end = (version.get(key) for key in ("version", "start", "end"))
        if not (isinstance(label, str) and label.isdecimal() and isinstance(start, int) and isinstance(end, int)):
            return ()
        spans.append(VersionSpan(int(label), end - start))
    return tuple(spans)
