"""What the scripted server computes, apart from HTTP: ids in, sampled ids and logprobs out, and the switches of `/control`."""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from rollouts.llm.scripted.script import Reply, Request, Script, decide
from rollouts.llm.scripted.template import Template, parse_prompt
from rollouts.llm.scripted.tokenizer import Tokenizer
from rollouts.llm.types import ChatMessage


class Switches(BaseModel):
    """Failures to come, set through `POST /control`. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    fail_next: int = 0  # this many generation requests are answered with `status`
    status: int = 503  # 0 closes the connection without an answer
    retry_after: int | None = None  # seconds, sent with a failure
    delay: float | None = None  # seconds, instead of the server's own
    healthy: bool = True  # what /health says
    omit_token_ids: bool = False
    omit_logprobs: bool = False


class Sampled(NamedTuple):
    """A generated reply. `stop_string` is what ended it, if one did."""

    text: str
    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str
    stop_string: str | None


class Limits(NamedTuple):
    """What a request asks for."""

    max_tokens: int
    stop: Sequence[str] = ()
    include_stop: bool = False
    skip_special: bool = True


class Backend:
    """The model that is none.

    Equal prompts get varying but reproducible replies: the seed, the prompt and how often it came before decide.
    """

    def __init__(self, script: Script, tokenizer: Tokenizer, template: Template, seed: int) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.template = template
        self._seed = seed
        self._seen: Counter[int] = Counter()

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> list[int]:
        """Messages to ids."""
        return self.tokenizer.encode(self.template(messages, add_generation_prompt))

    def decide(self, prompt_ids: Sequence[int], temperature: float) -> tuple[Reply, random.Random]:
        """What to answer. At temperature 0 a prompt always gets the same reply."""
        fingerprint = zlib.crc32(array("q", prompt_ids).tobytes())
        occurrence = self._seen[fingerprint]
        self._seen[fingerprint] += 1
        rng = random.Random(f"{self._seed} {fingerprint} {occurrence if temperature else 0}")  # noqa: S311
        messages = parse_prompt(self.tokenizer.decode(prompt_ids, skip_special=False))
        turn = 1 + sum(message["role"] == "assistant" for message in messages)
        return decide(Request(messages, turn, rng), self.script, occurrence), rng

    def sample(self, reply: Reply, rng: random.Random, limits: Limits) -> Sampled:
        """Turn a reply into ids, cut where a real server would cut it."""
        ids = self.tokenizer.sample(reply.text, rng)
        finish_reason, stop_string = reply.finish_reason, None
        cut = _first_stop(reply.text, limits.stop)
        text = None
        if cut is not None:
            start, stop_string = cut
            end = start + len(stop_string)
            ids = self._ids_reaching(ids, reply.text[:end])
            text = reply.text[: end if limits.include_stop else start]
        elif finish_reason == "stop":
            ids.append(self.tokenizer.end_of_turn)
        if len(ids) > limits.max_tokens:
            ids, finish_reason, stop_string, text = ids[: limits.max_tokens], "length", None, None
        logprobs: list[float | None] = [round(-rng.expovariate(2.0), 6) for _ in ids]
        if reply.flaw == "omit_logprob":
            logprobs[len(logprobs) // 2] = None
        elif reply.flaw == "nan":
            logprobs[len(logprobs) // 2] = float("nan")
        if text is None:
            text = self.tokenizer.decode(ids, skip_special=limits.skip_special)
        return Sampled(text, ids, logprobs, finish_reason, stop_string)

    def _ids_reaching(self, ids: Sequence[int], text: str) -> list[int]:
        """The fewest leading ids whose text starts with `text`."""
        count = next(n for n in range(len(ids) + 1) if self.tokenizer.decode(ids[:n], skip_special=False).startswith(text))
        return list(ids[:count])


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found) if found else None
