"""How vLLM's requests and answers look: reading the one, writing the other."""

from __future__ import annotations

from typing import Any, Protocol

from aiohttp import web

from rollouts.llm.scripted.backend import Limits, Sampled
from rollouts.llm.types import ChatMessage


class BadRequest(Exception):
    """The request is wrong; the message goes back with a 400."""


class HangUp(Exception):
    """The connection is to be closed without an answer."""


class Dialect(Protocol):
    """Writes the answer to a generation request."""

    def __call__(self, sampled: Sampled, prompt_ids: list[int], *, with_ids: bool, with_logprobs: bool) -> dict[str, Any]: ...


def completion_answer(sampled: Sampled, prompt_ids: list[int], *, with_ids: bool, with_logprobs: bool) -> dict[str, Any]:
    """The answer of /v1/completions."""
    choice: dict[str, Any] = {"text": sampled.text, **_ending(sampled)}
    choice["logprobs"] = {"token_logprobs": sampled.logprobs} if with_logprobs else None
    if with_ids:
        choice |= {"token_ids": sampled.token_ids, "prompt_token_ids": prompt_ids}
    return {"object": "text_completion", "choices": [choice], "usage": _usage(sampled, prompt_ids)}


def chat_answer(sampled: Sampled, prompt_ids: list[int], *, with_ids: bool, with_logprobs: bool) -> dict[str, Any]:
    """The answer of /v1/chat/completions."""
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": sampled.text}, **_ending(sampled)}
    entries: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ]
    choice["logprobs"] = {"content": entries} if with_logprobs else None
    answer: dict[str, Any] = {"object": "chat.completion", "choices": [choice], "usage": _usage(sampled, prompt_ids)}
    if with_ids:
        choice["token_ids"] = sampled.token_ids
        answer["prompt_token_ids"] = prompt_ids
    return answer


def read_limits(body: dict[str, Any], max_tokens: int) -> Limits:
    """The sampling settings of a generation request."""
    stop = body.get("stop") or ()
    return Limits(
        max_tokens=max_tokens,
        stop=[stop] if isinstance(stop, str) else list(stop),
        include_stop=bool(body.get("include_stop_str_in_output", False)),
        skip_special=bool(body.get("skip_special_tokens", True)),
    )


def read_messages(body: dict[str, Any]) -> list[ChatMessage]:
    """The messages of a request; content may be null or a list of text parts."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise BadRequest("messages must be a list of objects with a role")
    return [ChatMessage(role=message["role"], content=_text(message.get("content"))) for message in messages]


def error_response(status: int, message: str) -> web.Response:
    """An error in the shape of OpenAI's API."""
    return web.json_response({"error": {"message": message, "type": "ScriptedError", "code": status}}, status=status)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _ending(sampled: Sampled) -> dict[str, Any]:
    return {"index": 0, "finish_reason": sampled.finish_reason, "stop_reason": sampled.stop_string}


def _usage(sampled: Sampled, prompt_ids: list[int]) -> dict[str, int]:
    prompt, sampled_count = len(prompt_ids), len(sampled.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled_count, "total_tokens": prompt + sampled_count}
