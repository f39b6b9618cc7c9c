"""One reply to exact prompt ids, whatever happens to servers meanwhile: the one place where calls move and are resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from rollouts.llm.client import NO_PICTURES, ModelClient
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.reply import Reply
from rollouts.llm.route import CallCut, Overtaken, Route
from rollouts.llm.types import Completion, ModelCallRecord, Piece, Sampling, ServerAddress, TokenPrompt, VersionSpan
from sandboxes.protocol import Picture

Result = TypeVar("Result")

MAX_FAILURES = 3  # of servers in a row, for one reply or question
# An aborted call that brought nothing is made again after so long; a server that does nothing else is given up in the end.
ABORT_PAUSE = 0.25  # seconds
MAX_ABORTS = 40  # in a row

# As `client.Emit`, with the server that sampled the piece, as it was when it was asked.
Emit = Callable[[Piece, ServerAddress], Awaitable[None]]


class Sampled(NamedTuple):
    """A whole reply. `server` is the one that ended it; `spans` covers all ids, in order."""

    completion: Completion
    server: ServerAddress
    spans: tuple[VersionSpan, ...]

    def record(
        self, *, turn: int, segment: int, context: TokenPrompt, prompt_tokens: int, sampling: Sampling, **more: Any
    ) -> ModelCallRecord:
        """The call as it is stored. `more` is what whoever made it knows beyond that."""
        completion, server, spans = self
        return ModelCallRecord(
            turn=turn,
            segment=segment,
            context_ids=context.ids,
            placed=context.placed,
            sampled_ids=completion.token_ids,
            logprobs=completion.logprobs,
            text=completion.text,
            finish_reason=completion.finish_reason,
            prompt_tokens=prompt_tokens,
            policy=server.policy,
            policy_version=spans[0].version if spans else server.policy_version,
            server_id=server.server_id,
            latency=completion.latency,
            sampling=asdict(sampling) | {"stop": list(sampling.stop)},
            policy_version_last=spans[-1].version if spans else None,
            version_spans=spans if len(spans) > 1 else (),
            **more,
        )


async def ask(route: Route, question: Callable[[ServerAddress], Awaitable[Result]]) -> Result:
    """Put a question that samples nothing to the server that the next call goes to, and to another one where it fails.

    Else a server that dies while a tool runs would end the rollout at its next turn. Raises as `sample` does.
    """
    failures = 0
    while True:
        entered = False
        try:
            async with route.call() as server:
                entered = True
                return await question(server)
        except CallCut:
            pass
        except ModelError as error:
            failures += 1
            if not entered or not error.retryable or failures == MAX_FAILURES:
                raise


async def sample(
    client: ModelClient,
    route: Route,
    prompt: TokenPrompt,
    sampling: Sampling,
    *,
    timeout: float,
    emit: Emit | None = None,
    pictures: Mapping[str, Picture] = NO_PICTURES,
) -> Sampled:
    """Sample one reply. `timeout` is in seconds and spans all tries, but not the time in which servers take no calls.

    `pictures` has the data of all that are placed in the prompt, by digest.

    A reply that a server aborted is continued from its ids, by another server or newer weights; one that a server failed to
    give is asked for again. With `emit` every piece is given to it as it is sampled, and a reply of which something was given
    away goes on from there. The text of the result is that of all its ids, also where the pieces' texts leave a gap
    between two servers.

    Raises `ContextOverflow`; `Overtaken`; `ModelError` once `MAX_FAILURES` servers in a row have failed.
    """
    loop = asyncio.get_running_loop()
    reply = Reply(sampling)
    budget = timeout
    failures = aborts = 0
    while reply.finish_reason is None:
        had = len(reply.ids)
        entered = False
        try:
            async with route.call() as server:
                entered, begun = True, loop.time()
                try:
                    await _continue(reply, client, server, prompt, pictures, timeout=budget, emit=emit)
                finally:
                    budget -= loop.time() - begun
        except CallCut:
            pass
        except ContextOverflow:
            if not reply.ids:
                raise
            reply.finish_reason = "length"  # what was sampled before has filled the context
        except ModelError as error:
            failures = failures + 1 if len(reply.ids) == had else 1
            if not entered or not error.retryable or not reply.can_go_on or failures == MAX_FAILURES:
                raise
            aborts = 0
        else:
            failures = 0
            if reply.finish_reason is None and len(reply.ids) == had:
                aborts += 1
                if aborts == MAX_ABORTS:
                    raise ModelError(f"{server.url} aborts every generation", retryable=True)
                await asyncio.sleep(ABORT_PAUSE)
        if reply.finish_reason is None and budget <= 0:
            raise ModelError(f"no reply within {timeout:g} s", retryable=True)
    completion = await reply.completion(client, server)
    newest = max((span.version for span in completion.spans), default=None)
    if route.only_version is not None and newest is not None and newest > route.only_version:
        raise Overtaken(route.only_version, newest)  # by weights that the server had loaded before that was noted
    return Sampled(completion, server, completion.spans)


async def _continue(
    reply: Reply,
    client: ModelClient,
    server: ServerAddress,
    prompt: TokenPrompt,
    pictures: Mapping[str, Picture],
    *,
    timeout: float,
    emit: Emit | None,
) -> None:
    """Ask `server` for what is missing. What was given away stays, also when the rest does not come."""
    whole, left = prompt.followed_by(TokenPrompt(reply.ids)), reply.left()
    if emit is None:
        reply.add(await client.generate(server, whole, left, timeout=timeout, pictures=pictures), server)
        return
    given: list[Piece] = []

    async def give(piece: Piece) -> None:
        given.append(piece)
        await emit(piece, server)

    try:
        part = await client.generate(server, whole, left, timeout=timeout, emit=give, pictures=pictures)
    except BaseException:
        reply.add_pieces(given, server)
        raise
    reply.add(part, server)
