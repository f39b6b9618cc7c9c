"""The handlers of the endpoints between text and ids: `/tokenize`, `/detokenize`, and vLLM's render of a chat request."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from aiohttp import web

from rollouts.llm.scripted.answers import placeholders
from rollouts.llm.scripted.backend import Backend
from rollouts.llm.scripted.errors import check_context
from rollouts.llm.scripted.messages import read_messages
from rollouts.llm.scripted.reading import json_body, read_chat
from rollouts.llm.scripted.sequences import Given

_SAMPLING: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop_token_ids": [],
    "bad_words": [],
    "output_kind": 2,
    "skip_clone": True,
    "skip_reading_prefix_cache": False,
}
_UNUSED = (
    "token_offsets",
    "content_parts",
    "reasoning_ended",
    "reasoning_parser_kwargs",
    "return_token_ids",
    "stream_options",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
)


class RenderRoutes:
    """Handlers over one backend. `rendered` counts renders of messages."""

    def __init__(self, backend: Backend, max_model_len: int) -> None:
        self.rendered = 0
        self._backend = backend
        self._max_model_len = max_model_len

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.post("/v1/chat/completions/render", self._render),
        ]

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        tokenizer = self._backend.tokenizer
        ids = self._given(body).ids if "messages" in body else tokenizer.encode(str(body.get("prompt", "")))
        texts = [tokenizer.decode([token], skip_special=False) for token in ids]
        answer = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}
        return web.json_response(answer | {"token_strs": texts if body.get("return_token_strs") else None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        ids = self._backend.known_ids((await json_body(request)).get("tokens"))
        return web.json_response({"prompt": self._backend.tokenizer.decode(ids, skip_special=False)})

    async def _render(self, request: web.Request) -> web.Response:
        """As with `mm_payload` "none": the pictures' tensors are not in the answer."""
        body = await json_body(request)
        asked, given = read_chat(body), self._given(body)
        room = self._max_model_len - len(given.ids)
        max_tokens = room if asked.max_tokens is None else asked.max_tokens
        check_context(len(given.ids), max_tokens, self._max_model_len)
        sampling = {"temperature": asked.temperature, "stop": list(asked.stop), "max_tokens": min(max_tokens, room)}
        answer: dict[str, Any] = dict.fromkeys(_UNUSED) | {"stream": False, "output_mode": "tokens", "priority": 0}
        answer |= {"request_id": f"chatcmpl-{uuid.uuid4().hex[:16]}", "model": asked.model, "token_ids": given.ids}
        return web.json_response(answer | {"features": _features(given), "sampling_params": _SAMPLING | sampling})

    def _given(self, body: dict[str, Any]) -> Given:
        self.rendered += 1
        return self._backend.render(read_messages(body), bool(body.get("add_generation_prompt", True)))


def _features(given: Given) -> dict[str, Any] | None:
    """Where the pictures are, and what tells them apart; None where there is none."""
    places = placeholders(given)
    if places is None:
        return None
    hashes = {"image": [hashlib.sha256(place.data).hexdigest() for place in given.places]}
    return {"mm_hashes": hashes, "mm_placeholders": places, "kwargs_data": None, "mm_metadata": None}
