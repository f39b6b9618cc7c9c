"""Reading generation requests: completions, chat completions and the generate endpoint ask for the same things."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from rollouts.llm.scripted.answers import Wanted
from rollouts.llm.scripted.backend import Limits
from rollouts.llm.scripted.errors import BadRequest

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A generation request. `max_tokens` is None where it does not say."""

    model: str | None
    prompt: Any
    max_tokens: int | None
    temperature: float
    n: int
    seed: int | None
    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    stream: bool
    wanted: Wanted
    pictures: Sequence[str] = ()  # URLs

    def limits(self, max_tokens: int) -> Limits:
        return Limits(max_tokens, self.stop, self.include_stop, self.skip_special)


def read_completion(body: Json) -> Asked:
    """Of `/v1/completions`; `prompt` is text or ids."""
    wanted = _wanted(body, body.get("logprobs"))
    return _asked(body, body, body.get("prompt"), _number(body, "max_tokens", 16), wanted)


def read_chat(body: Json) -> Asked:
    """Of `/v1/chat/completions`, whose messages are read apart (`read_messages`)."""
    logprobs = _number(body, "top_logprobs", 0) if body.get("logprobs") else None
    tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
    wanted = _wanted(body, logprobs, tools=tools)
    limit = _number(body, "max_completion_tokens", None) or _number(body, "max_tokens", None)
    return _asked(body, body, None, limit, wanted)


def read_generate(body: Json) -> Asked:
    """Of `/inference/v1/generate`, whose sampling settings are apart; `prompt` is ids."""
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise BadRequest("1 validation error: sampling_params: Field required", param="body.sampling_params")
    wanted = _wanted(body | {"prompt_logprobs": sampling.get("prompt_logprobs")}, sampling.get("logprobs"))
    wanted = replace(wanted, text=body.get("output_mode") == "text")
    parts = [part for part in body.get("content_parts") or () if isinstance(part, dict) and part.get("type") == "image_url"]
    asked = _asked(body, sampling, body.get("token_ids"), _number(sampling, "max_tokens", None), wanted)
    return replace(asked, pictures=[str(part.get("url")) for part in parts])


async def json_body(request: web.Request) -> Json:
    """Raises `BadRequest`."""
    try:
        body = json.loads(await request.read())
    except ValueError as exc:
        raise BadRequest(f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _asked(body: Json, sampling: Json, prompt: Any, max_tokens: int | None, wanted: Wanted) -> Asked:
    stop = sampling.get("stop") or ()
    return Asked(
        model=body.get("model"),
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=float(sampling.get("temperature", 1.0)),
        n=_number(sampling, "n", 1) or 1,
        seed=_number(sampling, "seed", None),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(sampling.get("include_stop_str_in_output", False)),
        skip_special=bool(sampling.get("skip_special_tokens", True)),
        stream=bool(body.get("stream")),
        wanted=wanted,
    )


def _wanted(body: Json, logprobs: int | None, *, tools: bool = False) -> Wanted:
    return Wanted(
        token_ids=bool(body.get("return_token_ids")),
        logprobs=logprobs,
        prompt_logprobs=body.get("prompt_logprobs"),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        tools=tools,
    )


def _number(body: Json, name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise BadRequest(f"{name} must be a whole number", param=name)
    return value
