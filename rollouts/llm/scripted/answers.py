"""How vLLM's answers look, whole and as the chunks of a stream: `/v1/completions`, `/v1/chat/completions`, and generate."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rollouts.llm.scripted.messages import parse_calls
from rollouts.llm.scripted.probabilities import Probabilities
from rollouts.llm.scripted.sequences import Choice, Given, Request

Json = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What an answer is to contain. `logprobs` is how many alternatives to each id; None leaves all of them out."""

    token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    usage: bool = False  # in a last chunk of the stream
    text: bool = True
    tools: bool = False  # a tool parser looks at the reply


@dataclass(frozen=True)
class Part:
    """Of one choice, what an answer or chunk tells: ids from `start` on, and the text that they added."""

    choice: Choice
    start: int
    text: str
    first: bool
    last: bool

    @property
    def token_ids(self) -> list[int]:
        return self.choice.token_ids[self.start :]

    @property
    def ending(self) -> Json:
        reason = self.choice.finish_reason if self.last else None
        return {"finish_reason": reason, "stop_reason": self.choice.plan.stop_string if reason == "stop" else None}


class Dialect(Protocol):
    """One endpoint's way of writing."""

    def answer(self, parts: list[Part]) -> Json: ...

    def chunks(self, part: Part) -> Iterator[Json]: ...

    def usage(self) -> Json:
        """The last chunk of a stream that was asked for its usage."""
        ...


def placeholders(given: Given) -> Json | None:
    """Where the pictures are; None where there is none."""
    places = [{"offset": place.offset, "length": place.length} for place in given.places]
    return {"image": places} if places else None


class _Writer:
    prefix = ""

    def __init__(self, request: Request, wanted: Wanted, probabilities: Probabilities) -> None:
        self._request = request
        self._wanted = wanted
        self._probabilities = probabilities
        self._id = f"{self.prefix}-{uuid.uuid4().hex[:16]}"

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": int(time.time()), "model": self._request.model}

    def _count(self) -> Json:
        prompt, sampled = len(self._request.prompt_ids), self._request.sampled_count
        return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}

    def _whole_usage(self) -> Json:
        return self._count() | {"prompt_tokens_details": None, "completion_tokens_details": None}

    def _ids(self, part: Part) -> list[int] | None:
        return part.token_ids if self._wanted.token_ids else None

    def _prompt_ids(self) -> list[int] | None:
        return self._request.prompt_ids if self._wanted.token_ids else None

    def _prompt_logprobs(self) -> list[Json | None] | None:
        if self._wanted.prompt_logprobs is None:
            return None
        return self._probabilities.of_prompt(self._request, self._wanted.prompt_logprobs)


_UNUSED = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class Completions(_Writer):
    """`/v1/completions`."""

    prefix = "cmpl"

    def answer(self, parts: list[Part]) -> Json:
        more = {"prompt_logprobs": self._prompt_logprobs(), "prompt_token_ids": self._prompt_ids(), "routed_experts": None}
        choices = [self._choice(part) | {"token_ids": self._ids(part)} | more for part in parts]
        return self._head("text_completion") | {"choices": choices, "usage": self._whole_usage()} | _UNUSED

    def chunks(self, part: Part) -> Iterator[Json]:
        ids = {"prompt_token_ids": self._prompt_ids() if part.first else None, "token_ids": self._ids(part)}
        yield self._head("text_completion") | {"choices": [self._choice(part) | ids]}

    def usage(self) -> Json:
        return self._head("text_completion") | {"choices": [], "usage": self._count()}

    def _choice(self, part: Part) -> Json:
        logprobs = None
        if self._wanted.logprobs is not None:
            logprobs = self._probabilities.by_array(part.choice, part.start, self._wanted.logprobs)
        return {"index": part.choice.index, "text": part.text, "logprobs": logprobs, **part.ending}


class ChatCompletions(_Writer):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"

    def answer(self, parts: list[Part]) -> Json:
        choices = []
        for part in parts:
            text, calls = parse_calls(part.text) if self._wanted.tools else (part.text, [])
            message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
            message |= {"annotations": None, "audio": None, "function_call": None, "reasoning": None}
            ending = part.ending
            if calls:
                message["tool_calls"] = calls
                ending |= {"finish_reason": "tool_calls"} if ending["finish_reason"] == "stop" else {}
            choice = {"index": part.choice.index, "message": message, "logprobs": self._logprobs(part), **ending}
            choices.append(choice | {"token_ids": self._ids(part), "routed_experts": None})
        more = {"prompt_logprobs": self._prompt_logprobs(), "prompt_token_ids": self._prompt_ids(), "prompt_text": None}
        return self._head("chat.completion") | {"choices": choices, "usage": self._whole_usage()} | more | _UNUSED

    def chunks(self, part: Part) -> Iterator[Json]:
        if part.first:
            opening = {"index": part.choice.index, "delta": {"role": "assistant", "content": ""}}
            opening |= {"logprobs": None, "finish_reason": None}
            yield self._chunk(opening) | {"prompt_token_ids": self._prompt_ids(), "prompt_text": None}
        delta, ending = self._delta(part)
        ids = {"token_ids": self._ids(part)}
        yield self._chunk({"index": part.choice.index, "delta": delta, "logprobs": self._logprobs(part), **ending, **ids})

    def usage(self) -> Json:
        return self._head("chat.completion.chunk") | {"choices": [], "usage": self._count()}

    def _logprobs(self, part: Part) -> Json | None:
        if self._wanted.logprobs is None:
            return None
        return {"content": list(self._probabilities.by_token(part.choice, part.start, self._wanted.logprobs))}

    def _chunk(self, choice: Json) -> Json:
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _delta(self, part: Part) -> tuple[Json, Json]:
        ending = part.ending if part.last else {"finish_reason": None}
        if not self._wanted.tools:
            return {"content": part.text}, ending
        if not part.last:  # the parser waits for the end, since any text may be the beginning of a call
            return {}, ending
        text, calls = parse_calls(part.choice.plan.text)
        if not calls:
            return {"content": text}, ending
        delta: Json = {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}
        if text:
            delta["content"] = text
        return delta, ending | ({"finish_reason": "tool_calls"} if ending["finish_reason"] == "stop" else {})


class Generate(_Writer):
    """`/inference/v1/generate`: which also tells which weights sampled which ids."""

    prefix = "generate-tokens"

    def answer(self, parts: list[Part]) -> Json:
        head = {"request_id": self._id, "model": self._request.model, "created": int(time.time())}
        more: Json = {"prompt_logprobs": self._prompt_logprobs(), "prompt_token_id_logprobs": None}
        more |= {"prompt_token_ids": self._prompt_ids(), "mm_placeholders": self._places()}
        choices = [self._choice(part) for part in parts]
        return head | {"usage": self._whole_usage()} | more | _UNUSED | {"output_mode": self._mode, "choices": choices}

    def chunks(self, part: Part) -> Iterator[Json]:
        chunk: Json = {"request_id": self._id, "usage": None, "output_mode": self._mode, "choices": [self._choice(part)]}
        if part.first and self._wanted.token_ids:
            chunk["prompt_token_ids"] = self._request.prompt_ids
            if places := self._places():
                chunk["mm_placeholders"] = places
        yield chunk

    def usage(self) -> Json:
        return {"request_id": self._id, "usage": self._count(), "output_mode": self._mode, "choices": []}

    def _places(self) -> Json | None:
        return placeholders(self._request.given) if self._wanted.token_ids else None

    @property
    def _mode(self) -> str:
        return "text" if self._wanted.text else "tokens"

    def _choice(self, part: Part) -> Json:
        spans = [span._asdict() for span in part.choice.spans] if part.last else None
        choice = {"index": part.choice.index, **part.ending, "token_ids": part.token_ids}
        choice |= {"routed_experts": None, "sampling_mask": None, "weight_versions": spans}
        if self._wanted.text:
            choice["text"] = part.text
        return choice | {"logprobs": self._logprobs(part)}

    def _logprobs(self, part: Part) -> Json | None:
        count = self._wanted.logprobs
        if count is None:
            return None
        if self._wanted.text:
            return {"content": list(self._probabilities.by_token(part.choice, part.start, 1 + count))}
        return {"content": list(self._probabilities.by_id(part.choice, part.start, count))}


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
