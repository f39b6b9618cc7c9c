"""What the scripted server computes, apart from HTTP and time: ids in, the ids of a reply out; and what `/control` switches."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from rollouts.llm.scripted.errors import BadRequest
from rollouts.llm.scripted.messages import Chat
from rollouts.llm.scripted.pictures import expand, load
from rollouts.llm.scripted.script import Reply, Request, Script, decide
from rollouts.llm.scripted.sequences import Given, Plan
from rollouts.llm.scripted.template import Template, parse_prompt
from rollouts.llm.scripted.tokenizer import Tokenizer


class Switches(BaseModel):
    """Failures to come, set through `POST /control`. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    fail_next: int = 0  # this many generation requests are answered with `status`
    status: int = 503  # 0 closes the connection without an answer
    retry_after: int | None = None  # seconds, sent with a failure
    delay: float | None = None  # seconds before the first token, instead of the server's own
    healthy: bool = True  # what /health says
    broken: bool = False  # every generation fails, as with a dead engine behind a front end that answers
    expand_otherwise: bool = False  # a picture becomes other ids when sampled from than the renders tell
    fail_reload: bool = False  # new weights cannot be loaded
    reload_seconds: float = 0.0  # how long loading takes
    omit_token_ids: bool = False
    omit_logprobs: bool = False
    flaw: Literal["", "omit_logprob", "nan"] = ""  # of one id in the middle of every reply


class Limits(NamedTuple):
    """What a request asks for."""

    max_tokens: int
    stop: Sequence[str] = ()
    include_stop: bool = False
    skip_special: bool = True


class Backend:
    """The model that is none.

    Equal prompts get varying but reproducible replies: the seed, the prompt and how often it came before decide. A prompt that
    ends in the middle of a reply is continued, where that reply is the beginning of the one that it would get. It is called
    `model`, and sees when `pictures`.
    """

    def __init__(
        self, script: Script, tokenizer: Tokenizer, template: Template, seed: int, *, model: str, pictures: bool
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.template = template
        self._seed = seed
        self._model = model
        self._sees = pictures
        self._seen: Counter[int] = Counter()

    def render(self, chat: Chat, add_generation_prompt: bool) -> Given:
        """Messages to ids."""
        text = self.template(chat.messages, add_generation_prompt)
        return self.given(self.tokenizer.encode(text), chat.pictures)

    def known_ids(self, value: object) -> list[int]:
        """Raises `BadRequest` for anything but ids of this tokenizer."""
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise BadRequest("expected a list of token ids")
        for token in value:
            if not 0 <= token < self.tokenizer.size:
                raise BadRequest(f"Token id {token} is out of vocabulary")
        return value

    def given(self, ids: list[int], pictures: Sequence[str], *, otherwise: bool = False) -> Given:
        """What the model gets when these ids and URLs of pictures are sent. Raises `BadRequest`."""
        if not pictures:
            return Given(ids)
        if not self._sees:
            raise BadRequest(f"{self._model} is not a multimodal model")
        return expand(self.tokenizer, ids, [load(url) for url in pictures], otherwise=otherwise)

    def decide(
        self, given: Given, temperature: float, seed: int | None, index: int, weights: str
    ) -> tuple[Reply, random.Random]:
        """What to answer as choice number `index`. At temperature 0, or with a seed, a prompt always gets the same replies."""
        pictures = [place.data for place in given.places]
        prompt = parse_prompt(self.tokenizer.decode(given.text_ids(), skip_special=False))
        fingerprint = zlib.crc32(prompt.text.encode(), zlib.crc32(b"".join(pictures)))
        if not prompt.begun:
            self._seen[fingerprint] += 1
        occurrence = max(0, self._seen[fingerprint] - 1)
        luck = f"seed {seed} {index}" if seed is not None else str(occurrence if temperature else 0)
        rng = random.Random(f"{self._seed} {fingerprint} {luck}")  # noqa: S311
        turn = 1 + sum(message["role"] == "assistant" for message in prompt.messages)
        reply = decide(Request(prompt.messages, turn, rng, weights, pictures), self.script, occurrence)
        if prompt.begun and reply.text.startswith(prompt.begun):
            reply = replace(reply, text=reply.text[len(prompt.begun) :])
        return reply, rng

    def plan(self, reply: Reply, rng: random.Random, limits: Limits, flaw: str) -> Plan:
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
        elif finish_reason == "abort" and ids:
            ids = ids[: (len(ids) + 1) // 2]
        elif finish_reason in ("stop", "abort"):
            finish_reason = "stop"
            ids.append(self.tokenizer.end_of_turn)
        if len(ids) > limits.max_tokens:
            ids, finish_reason, stop_string, text = ids[: limits.max_tokens], "length", None, None
        if text is None:
            text = self.tokenizer.decode(ids, skip_special=limits.skip_special)
        return Plan(ids, text, finish_reason, stop_string, reply.flaw or flaw)

    def _ids_reaching(self, ids: Sequence[int], text: str) -> list[int]:
        """The fewest leading ids whose text starts with `text`."""
        count = next(n for n in range(len(ids) + 1) if self.tokenizer.decode(ids[:n], skip_special=False).startswith(text))
        return list(ids[:count])


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found) if found else None
