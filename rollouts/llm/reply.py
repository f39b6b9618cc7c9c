"""A reply that may come in parts, from several servers or weights: what is known of it, and what is still to be asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ModelError
from rollouts.llm.types import Completion, FinishReason, Piece, Sampling, ServerAddress, VersionSpan

_HALF_A_CHARACTER = "\ufffd"


class _Seam(NamedTuple):
    """Where one part ends and the next begins: so many ids and characters come before."""

    ids: int
    characters: int


class Reply:
    """Collects parts. All ids of a part that did not end the reply must be known, or it cannot be continued."""

    def __init__(self, sampling: Sampling) -> None:
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._sampling = sampling
        self._text = ""
        self._logprobs: list[float] | None = []
        self._spans: list[VersionSpan] = []
        self._seams: list[_Seam] = []
        self._latency = 0.0
        self.can_go_on = True

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled which ids: neighbours differ, and together they cover all of them."""
        return merged(self._spans)

    def left(self) -> Sampling:
        """How to sample what is missing. A seed is moved on: the same random numbers again would not be independent."""
        seed = self._sampling.seed
        return replace(
            self._sampling,
            max_tokens=self._sampling.max_tokens - len(self.ids),
            seed=None if seed is None else seed + len(self.ids),
        )

    def add(self, part: Completion, server: ServerAddress) -> None:
        """Take what `server` sampled after what is there."""
        self._latency += part.latency
        if part.finish_reason == "abort" and not part.token_ids:
            return  # nothing that can be continued; a text without ids is asked for again
        if self.ids:
            self._seams.append(_Seam(len(self.ids), len(self._text)))
        self._text += part.text
        self.ids += part.token_ids
        self._logprobs = None if self._logprobs is None or part.logprobs is None else self._logprobs + part.logprobs
        self._spans += part.spans or [VersionSpan(server.policy_version, len(part.token_ids))]
        if part.finish_reason != "abort":
            self.finish_reason = part.finish_reason
        elif len(self.ids) >= self._sampling.max_tokens:
            self.finish_reason = "length"

    def add_pieces(self, pieces: Sequence[Piece], server: ServerAddress) -> None:
        """Take what was given away of a stream that broke off."""
        self.can_go_on = all(piece.token_ids for piece in pieces if piece.text)
        logprobs: list[float] | None = []
        for piece in pieces:
            logprobs = None if logprobs is None or piece.logprobs is None else logprobs + piece.logprobs
        ids = [token for piece in pieces for token in piece.token_ids]
        self.add(Completion("".join(piece.text for piece in pieces), ids, logprobs, "abort", 0.0), server)

    async def completion(self, client: ModelClient, server: ServerAddress) -> Completion:
        """The whole reply. `server` is asked about seams where a character or a stop string lies across."""
        assert self.finish_reason is not None  # noqa: S101 - asked for once it has ended
        for seam in self._seams:
            if await self._stopped_across(seam, client, server):
                break
        else:
            await self._mend_text(client, server)
        return Completion(
            text=self._text,
            token_ids=self.ids,
            logprobs=self._logprobs if self.ids else None,
            finish_reason=self.finish_reason,
            latency=self._latency,
            spans=self.spans,
        )

    async def _stopped_across(self, seam: _Seam, client: ModelClient, server: ServerAddress) -> bool:
        """A server looks for stop strings in its own part only. What lies beyond one across a seam was sampled in vain."""
        found = []
        for stop in self._sampling.stop:
            begin = self._text.find(stop, max(0, seam.characters - len(stop) + 1), seam.characters + len(stop) - 1)
            if begin >= 0:
                found.append((begin + len(stop), stop))
        if not found:
            return False
        end, stop = min(found)
        before = await client.detokenize(server, self.ids[: seam.ids])
        count = seam.ids + 1
        while count < len(self.ids):
            if stop in (await client.detokenize(server, self.ids[:count]))[max(0, len(before) - len(stop)) :]:
                break
            count += 1
        self._text = self._text[:end]
        self.ids = self.ids[:count]
        self._logprobs = None if self._logprobs is None else self._logprobs[:count]
        self._spans = list(_first(self._spans, count))
        self.finish_reason = "stop"
        return True

    async def _mend_text(self, client: ModelClient, server: ServerAddress) -> None:
        """Decode all ids at once where one part ended within a character: neither server had all of its bytes."""
        try:
            for seam in self._seams:
                if (await client.detokenize(server, self.ids[: seam.ids])).endswith(_HALF_A_CHARACTER):
                    ending = await client.detokenize(server, self.ids[-1:]) if self.finish_reason == "stop" else ""
                    # The parts' texts leave special ids out, and one of them has ended the turn.
                    ended_by_id = ending and not self._text.endswith(ending)
                    self._text = await client.detokenize(server, self.ids[:-1] if ended_by_id else self.ids)
                    return
        except ModelError:
            return  # the text is for people and parsers; the ids are what counts


def merged(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same, with one span for neighbours of one version."""
    kept: list[VersionSpan] = []
    for span in spans:
        if kept and kept[-1].version == span.version:
            kept[-1] = VersionSpan(span.version, kept[-1].tokens + span.tokens)
        elif span.tokens:
            kept.append(span)
    return tuple(kept)


def _first(spans: Sequence[VersionSpan], tokens: int) -> list[VersionSpan]:
    kept = []
    for version, length in spans:
        kept.append(VersionSpan(version, min(length, tokens)))
        tokens -= kept[-1].tokens
    return kept
