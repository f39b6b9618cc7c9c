"""Finding out what a model server can do, by asking it for a token and looking at which doors it has. Changes nothing there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollouts.llm.capabilities import Capabilities, Feature
from rollouts.llm.client import HELPER_TIMEOUT, ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.picture_probe import ONE_TOKEN, find_picture_id
from rollouts.llm.tokens import prove_equal
from rollouts.llm.transport import Transport
from rollouts.llm.types import ChatMessage, Completion, ServerAddress, TokenPrompt


class WrongTokenizer(ModelError):
    """The tokenizer files here are missing, broken, or not those that the server uses."""


_QUESTION: list[ChatMessage] = [{"role": "user", "content": "Hi"}]
_TOOL = {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}}
_UNTOLD_LENGTH = 4096  # assumed for the probe's own question where the server does not tell

# Asked with GET: what is only for POST answers 405, what is not there 404.
_DOORS = {
    Feature.PAUSE: ("/pause", "/resume"),
    Feature.RELOAD_WEIGHTS: ("/collective_rpc",),
    Feature.LORA: ("/v1/load_lora_adapter",),
    Feature.SLEEP: ("/sleep", "/wake_up"),
}


async def probe(url: str, *, api_key: str = "", model: str = "", tokenizer: str = "") -> Capabilities:
    """Ask the server at `url` (its root, without /v1) about `model`, or the first one that it serves.

    With `tokenizer`, a directory of the model's tokenizer files here, its renders are proven equal to the server's. Raises
    `ModelError` when the server does not answer as a model server, `WrongTokenizer` when the tokenizer is another one.
    """
    url = url.rstrip("/")
    transport, client = Transport(), ModelClient()
    try:
        found = _Probe(transport, client, url, api_key)
        return await found.all_of(model, tokenizer)
    finally:
        await transport.close()
        await client.close()


async def samples_a_token(client: ModelClient, server: ServerAddress, *, timeout: float) -> None:
    """Raises `ModelError` when the server does not sample one: it may answer health checks and yet fail every call."""
    try:
        await client.generate(server, TokenPrompt([1]), ONE_TOKEN, timeout=timeout)
    except ContextOverflow as error:
        raise ModelError(str(error), retryable=False) from error


class _Probe:
    def __init__(self, transport: Transport, client: ModelClient, url: str, api_key: str) -> None:
        self._transport = transport
        self._client = client
        self._url = url
        self._api_key = api_key

    async def all_of(self, wanted: str, tokenizer: str) -> Capabilities:
        listing = await self._get("/v1/models")
        models = {m["id"]: m for m in listing.get("data") or () if isinstance(m, dict) and isinstance(m.get("id"), str)}
        if not models:
            raise ModelError(f"{self._url} serves no model", retryable=True)
        model = wanted if wanted in models else next(iter(models))
        length = models[model].get("max_model_len")
        length = length if isinstance(length, int) else None
        server = ServerAddress(self._url, model, "", 0, length or _UNTOLD_LENGTH, api_key=self._api_key, tokenizer=tokenizer)
        prompt = await self._prompt(server)
        features = await self._sampling(server, prompt or TokenPrompt([1]))
        if prompt is not None:
            features.add(Feature.TOKENIZE)
            if tokenizer:
                await self._prove(server)
        picture_id = await find_picture_id(self._client, server) if {Feature.TOKENIZE, Feature.GENERATE} <= features else None
        if picture_id is not None:
            features.add(Feature.PICTURES)
        doors = await asyncio.gather(*(self._has_all(paths) for paths in _DOORS.values()))
        features |= {feature for feature, there in zip(_DOORS, doors, strict=True) if there}
        if await self._has_all(("/metrics",)):
            features.add(Feature.METRICS)
        weights = await self._told("/weight_info")
        if "weight_version" in weights:
            features.add(Feature.WEIGHT_VERSION)
        version = str((await self._told("/version")).get("version", ""))
        return Capabilities(
            models=tuple(models),
            model=model,
            engine=_engine(models[model].get("owned_by"), version),
            max_model_len=length,
            features=frozenset(features),
            version=version,
            weight_version=str(weights.get("weight_version") or ""),
            picture_id=picture_id,
        )

    async def _prove(self, server: ServerAddress) -> None:
        try:
            await prove_equal(self._client, server)
        except ModelError as error:
            if error.retryable:
                raise
            raise WrongTokenizer(str(error), retryable=False) from error

    async def _prompt(self, server: ServerAddress) -> TokenPrompt | None:
        """Ids as the server renders them; None when it does not."""
        try:
            return await self._client.render(replace(server, tokenizer=""), _QUESTION, add_generation_prompt=True)
        except ModelError as error:
            if _not_there(error):
                return None
            raise

    async def _sampling(self, server: ServerAddress, prompt: TokenPrompt) -> set[Feature]:
        """What a reply of one token brings, on each endpoint that gives one."""
        try:
            completion = await self._client.generate(server, prompt, ONE_TOKEN, timeout=HELPER_TIMEOUT)
        except ModelError as error:
            if not _not_there(error):
                raise
            return await self._chat(server)  # it takes no ids, or has no completions at all
        features = {Feature.ID_PROMPTS, *_returned(completion)}
        generating = replace(server, features=frozenset({Feature.GENERATE}))
        if await self._works(lambda: self._client.generate(generating, prompt, ONE_TOKEN, timeout=HELPER_TIMEOUT)):
            features.add(Feature.GENERATE)
        asked = {"model": server.model, "prompt": prompt.ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._answer("/v1/completions", asked)
        if any(choice.get("prompt_logprobs") for choice in answer.get("choices") or () if isinstance(choice, dict)):
            features.add(Feature.PROMPT_LOGPROBS)
        return features | await self._chat(server)

    async def _chat(self, server: ServerAddress) -> set[Feature]:
        asked = {"model": server.model, "messages": _QUESTION, "max_tokens": 1, "tools": [_TOOL], "tool_choice": "auto"}
        return {Feature.CHAT_TOOLS} if (await self._answer("/v1/chat/completions", asked)).get("choices") else set()

    async def _works(self, call: Callable[[], Any]) -> bool:
        try:
            await call()
        except ModelError as error:
            if _is_missing(error):
                return False
            raise
        return True

    async def _has_all(self, paths: tuple[str, ...]) -> bool:
        for path in paths:
            try:
                await self._get(path)
            except ModelError as error:
                if error.status not in (200, 405):  # 200: there, but not JSON
                    return False
        return True

    async def _told(self, path: str) -> dict[str, Any]:
        """What the server says there; empty when it says nothing."""
        try:
            return await self._get(path)
        except ModelError:
            return {}

    async def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Its answer; empty when it refuses."""
        try:
            return await self._request("POST", path, body)
        except ModelError as error:
            if _is_missing(error):
                return {}
            raise

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._request("GET", path, None)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        url = self._url + path
        return await self._transport.request(method, url, body, api_key=self._api_key, timeout=HELPER_TIMEOUT)


def _is_missing(error: ModelError) -> bool:
    """The same of what a server need not have: some close the connection where they do not know a path."""
    return error.status is None or _not_there(error)


def _not_there(error: ModelError) -> bool:
    """The server refuses this kind of request; it is not that the server is ill, or that the key is wrong."""
    return error.status is not None and error.status not in (401, 429, 503)


def _returned(completion: Completion) -> set[Feature]:
    found = {Feature.TOKEN_IDS} if completion.token_ids else set()
    return found | ({Feature.LOGPROBS} if completion.logprobs is not None else set())


def _engine(owner: Any, version: str) -> str:
    """`owned_by` of its models says it; what has `/version` beside speaks as vLLM does."""
    if owner == "sglang":
        return "sglang"
    return "vllm" if owner == "vllm" or version else "openai"
