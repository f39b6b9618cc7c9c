"""Sampling what was planned, and telling it to the agent: all of it at once, or as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from rollouts.gateway.passing import chat_body, read_chat
from rollouts.gateway.planning import Plan, Planner
from rollouts.gateway.replies import Event, Told
from rollouts.gateway.requests import ModelRequest
from rollouts.gateway.texts import Telling, take_apart
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ModelError
from rollouts.llm.messages import pictures_in
from rollouts.llm.replies import REASONING_START
from rollouts.llm.reply import merged
from rollouts.llm.route import Route
from rollouts.llm.sampler import Sampled, ask, sample
from rollouts.llm.types import Completion, Piece, Sampling, ServerAddress, VersionSpan

_TAG_IDS = 16  # more than a tag of reasoning has


class Answer(NamedTuple):
    """A reply as it was sampled and as the agent is told it."""

    sampled: Sampled
    told: Told


class CallSampler:
    """Samples the calls of one session. `call_timeout` (seconds) spans all tries of one reply."""

    def __init__(self, client: ModelClient, route: Route, planner: Planner, *, call_timeout: float) -> None:
        self._client = client
        self._route = route
        self._planner = planner
        self._call_timeout = call_timeout
        self._thinking: bool | None = None  # whether prompts end within a tag of reasoning; None: not known yet

    async def whole(self, request: ModelRequest, plan: Plan, sampling: Sampling) -> Answer:
        """Raises `ModelError` and `ContextOverflow`, as `in_pieces` does."""
        if plan.is_text:
            return await self._pass_on(request, sampling)
        sampled = await self._sample(request, plan, sampling)
        # Reasoning that has ended shows by itself whether the prompt began it.
        thinking = sampled.completion.finish_reason == "length" and await self._opens_reasoning(request, plan)
        tool_format = self._planner.tool_format(plan)
        return Answer(sampled, take_apart(sampled.completion.text, request, sampling.stop, tool_format, thinking=thinking))

    async def in_pieces(
        self,
        request: ModelRequest,
        plan: Plan,
        sampling: Sampling,
        *,
        tell: Callable[[Event], None],
        keep: Callable[[Sampled], Awaitable[object]],
    ) -> Answer:
        """`tell` every event as it comes. What was sampled until the call was cancelled is given to `keep`."""
        if plan.is_text:
            answer = await self._pass_on(request, sampling)
            for event in answer.told.events():
                tell(event)
            return answer
        thinking = await self._opens_reasoning(request, plan)
        telling = Telling(request, sampling.stop, self._planner.tool_format(plan), thinking=thinking)
        given: list[tuple[Piece, ServerAddress]] = []

        async def emit(piece: Piece, server: ServerAddress) -> None:
            given.append((piece, server))
            for event in telling.add(piece.text):
                tell(event)

        started = time.monotonic()
        try:
            sampled = await self._sample(request, plan, sampling, emit=emit)
        except asyncio.CancelledError:
            if cut := self._cut_off(given, time.monotonic() - started):
                await keep(cut)
            raise
        told, rest = telling.end(sampled.completion.text)
        for event in rest:
            tell(event)
        return Answer(sampled, told)

    async def _pass_on(self, request: ModelRequest, sampling: Sampling) -> Answer:
        started = time.monotonic()
        async with self._route.call() as server:
            answer = await self._client.chat(server, chat_body(request, sampling), timeout=self._call_timeout)
            completion, told = read_chat(answer, request, time.monotonic() - started)
        return Answer(Sampled(completion, server, ()), told)

    async def _sample(self, request: ModelRequest, plan: Plan, sampling: Sampling, **streaming: Any) -> Sampled:
        # Those of earlier calls are in the request again: the keys by which these were found have the pictures' digests.
        pictures = pictures_in(request.messages)
        timeout = self._call_timeout
        return await sample(self._client, self._route, plan.prompt, sampling, timeout=timeout, pictures=pictures, **streaming)

    async def _opens_reasoning(self, request: ModelRequest, plan: Plan) -> bool:
        """Whether the prompts of this model end within a tag of reasoning. Found out once, from the end of a prompt."""
        if request.prompt is not None:
            return False
        if self._thinking is None:
            try:
                ids = plan.prompt.ids[-_TAG_IDS:]
                end = await ask(self._route, lambda server: self._client.detokenize(server, ids))
            except ModelError as exc:
                if exc.retryable:
                    raise
                end = ""  # a server that does not tell
            self._thinking = end.rstrip().endswith(REASONING_START)
        return self._thinking

    def _cut_off(self, given: Sequence[tuple[Piece, ServerAddress]], latency: float) -> Sampled | None:
        """What was sampled until the agent wanted no more of it; None where nothing was, or nobody knows by which weights."""
        ids = [token for piece, _ in given for token in piece.token_ids]
        if not ids:
            return None
        server, now = given[-1][1], self._route.server
        if now.server_id == server.server_id and now.policy_version != server.policy_version:
            return None  # they were changed under it, and where, the server would have said at its end
        logprobs = [value for piece, _ in given for value in piece.logprobs or ()]
        text = "".join(piece.text for piece, _ in given)
        completion = Completion(text, ids, logprobs if len(logprobs) == len(ids) else None, "abort", latency)
        return Sampled(completion, server, merged(VersionSpan(s.policy_version, len(p.token_ids)) for p, s in given))
