"""Whether two servers answer in the same shapes: which members their JSON has, and of which types these are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

_ONLY_IN_VLLM = ("system_fingerprint", "service_tier", "data[].permission", "data[].created", "error.message")


async def same_shapes(path: str, body: dict[str, Any] | None, real: tuple[str, str], scripted: tuple[str, str]) -> None:
    """Ask both, each given as its URL and model; a body of None is a GET. Fails where the answers differ in status or shape."""
    theirs, ours = await asyncio.gather(ask(path, body, *real), ask(path, body, *scripted))
    compare(theirs, ours, f"{path} {body}")


async def ask(path: str, body: dict[str, Any] | None, url: str, model: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await (http.get(path) if body is None else http.post(path, json=body | {"model": model}))


def compare(theirs: httpx.Response, ours: httpx.Response, what: str) -> None:
    """vLLM's answer and the scripted server's to the same request."""
    assert ours.status_code == theirs.status_code, (what, ours.text, theirs.text)
    missing = _shape(ours) - _shape(theirs)
    assert not missing, f"{what}: not in vLLM's answer: {sorted(missing)}"
    unknown = {member for member in _shape(theirs) - _shape(ours) if not member.startswith(_ONLY_IN_VLLM)}
    assert not unknown, f"{what}: only in vLLM's answer: {sorted(unknown)}"


def _shape(response: httpx.Response) -> set[str]:
    """Which members an answer has, and of which JSON type they are; of a stream, those of all its chunks.

    How many tokens a chunk holds depends on the load, and so does whether what only the last one has is null in others.
    """
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        found = set().union(*(_members(json.loads(event)) for event in events[:-1]))
        return {member for member in found if not member.endswith(": NoneType")}
    return _members(response.json())


def _members(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        if any(key.isdecimal() for key in value):  # ids as keys
            value = {"<id>": next(iter(value.values()))}
        elif path.endswith("top_logprobs[]") and "logprob" not in value and "token_id" not in value:
            value = {"<token>": next(iter(value.values()))}
        return {path}.union(*(_members(member, f"{path}.{key}".lstrip(".")) for key, member in value.items()))
    if isinstance(value, list):
        return {f"{path}: list"}.union(*(_members(member, f"{path}[]") for member in value))
    kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    return {f"{path}: {kind}"}
