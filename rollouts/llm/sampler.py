"""One reply to exact prompt ids, whatever happens to servers meanwhile: the one place where calls move and are resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ModelError
from rollouts.llm.route import CallCut, Route
from rollouts.llm.types import Completion, Sampling, ServerAddress, VersionSpan

MAX_FAILURES = 3  # of servers in a row, for one reply


class Sampled(NamedTuple):
    """A whole reply. `server` is the one that ended it; `spans` covers all ids, in order."""

    completion: Completion
    server: ServerAddress
    spans: tuple[VersionSpan, ...]


async def sample(
    client: ModelClient, route: Route, prompt_ids: Sequence[int], sampling: Sampling, *, timeout: float
) -> Sampled:
    """Sample one reply. `timeout` is in seconds and spans all tries.

    A reply that a server aborted is continued from its ids, by another server or newer weights; one that a server failed to
    give is asked for again. Raises `ContextOverflow`; `ModelError` once `MAX_FAILURES` servers in a row have failed.
    """
    parts: list[Completion] = []
    spans: list[VersionSpan] = []
    failures = 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                done = [token for part in parts for token in part.token_ids]
                left = replace(sampling, max_tokens=sampling.max_tokens - len(done))
                try:
                    async with route.call() as server:
                        part = await client.generate(server, [*prompt_ids, *done], left, timeout=timeout)
                        if part.finish_reason == "abort" and not part.token_ids:
                            raise ModelError(f"{server.url} aborted the generation", retryable=True)
                except CallCut:
                    continue
                except ModelError as error:
                    failures += 1
                    if failures == MAX_FAILURES or not error.retryable:
                        raise
                    continue
                failures = 0
                parts.append(part)
                spans += part.spans or [VersionSpan(server.policy_version, len(part.token_ids))]
                if part.finish_reason != "abort":
                    return Sampled(_joined(parts), server, _merged(spans))
                if len(done) + len(part.token_ids) >= sampling.max_tokens:
                    return Sampled(replace(_joined(parts), finish_reason="length"), server, _merged(spans))
    except TimeoutError as error:
        raise ModelError(f"no reply within {timeout:g} s", retryable=True) from error


def _joined(parts: Sequence[Completion]) -> Completion:
    logprobs: list[float] | None = []
    for part in parts:
        logprobs = None if logprobs is None or part.logprobs is None else logprobs + part.logprobs
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=logprobs,
        latency=sum(part.latency for part in parts),
    )


def _merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(span.version, merged[-1].tokens + span.tokens)
        elif span.tokens:
            merged.append(span)
    return tuple(merged)
