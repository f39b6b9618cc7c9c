"""One reply, whatever happens to servers meanwhile: against scripted servers that take their time for each token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rollouts.llm.capabilities import Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ModelError
from rollouts.llm.route import CallCut, FixedRoute, OneVersionRoute, Overtaken
from rollouts.llm.sampler import Sampled, sample
from rollouts.llm.scripted.sequences import fingerprint, logprob
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import ChatMessage, Piece, Sampling, ServerAddress, TokenPrompt, VersionSpan

TEXT = "Ünïcödé and ordinary words, so that replies are long enough to be interrupted: 日本語."
QUESTION = f"[[reply:{TEXT}]]"


class Way:
    """A route that the test leads: each call goes to the next address, the last one again and again."""

    only_version: int | None = None

    def __init__(self, *addresses: ServerAddress) -> None:
        self.addresses = list(addresses)
        self.calls = 0
        self.cut = asyncio.Event()
        self.before: Callable[[], Awaitable[None]] | None = None  # what a call waits for

    @property
    def server(self) -> ServerAddress:
        return self.addresses[min(self.calls, len(self.addresses) - 1)]

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[ServerAddress]:
        if self.before is not None:
            await self.before()
        address = self.server
        self.calls += 1
        try:
            async with asyncio.timeout(None) as cut:
                watching = asyncio.create_task(self._cut_off(cut))
                try:
                    yield address
                finally:
                    watching.cancel()
        except TimeoutError as error:
            if cut.expired():
                raise CallCut from error
            raise

    async def _cut_off(self, cut: asyncio.Timeout) -> None:
        await self.cut.wait()
        self.cut.clear()
        cut.reschedule(0)


@pytest.fixture
async def client() -> AsyncIterator[ModelClient]:
    client = ModelClient()
    yield client
    await client.close()


@pytest.fixture
async def servers() -> AsyncIterator[list[ScriptedServer]]:
    async with ScriptedServer(token_delay=0.01) as one, ScriptedServer(token_delay=0.01, seed=1) as other:
        yield [one, other]


def address(server: ScriptedServer, version: int = 0, *features: Feature) -> ServerAddress:
    known = ServerAddress(server.url, server.model, "tiny", version, server.max_model_len)
    return replace(known, features=frozenset(features))


async def prompt(client: ModelClient, server: ScriptedServer, question: str = QUESTION) -> TokenPrompt:
    messages: list[ChatMessage] = [{"role": "user", "content": question}]
    return await client.render(address(server), messages, add_generation_prompt=True)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def post(server: ScriptedServer, path: str, body: dict[str, Any] | None = None) -> None:
    async with httpx.AsyncClient() as http:
        (await http.post(server.url + path, json=body or {})).raise_for_status()


def check_logprobs(sampled: Sampled, asked: TokenPrompt, weights: str = "") -> None:
    """They are those of exactly this sequence."""
    before = fingerprint(asked.ids)
    completion = sampled.completion
    assert completion.logprobs is not None
    for token, value in zip(completion.token_ids, completion.logprobs, strict=True):
        assert value == pytest.approx(logprob(weights, before, token))
        before = fingerprint([token], before)


async def test_an_aborted_reply_is_continued_from_its_ids(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0])
    way = Way(address(servers[0], 1), address(servers[1], 2))
    sampling = asyncio.create_task(sample(client, way, asked, Sampling(max_tokens=300), timeout=60))
    await until(lambda: servers[0].generated_tokens or servers[0].running)
    await asyncio.sleep(0.15)  # some tokens; how many does not matter
    await post(servers[0], "/abort_requests")
    sampled = await sampling
    assert sampled.completion.text == TEXT
    assert sampled.completion.finish_reason == "stop"
    assert [span.version for span in sampled.spans] == [1, 2]
    assert sum(span.tokens for span in sampled.spans) == len(sampled.completion.token_ids)
    check_logprobs(sampled, asked)


async def test_a_stream_that_breaks_off_goes_on_elsewhere(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0])
    pieces: list[Piece] = []

    async def emit(piece: Piece, server: ServerAddress) -> None:
        pieces.append(piece)
        if sum(len(p.token_ids) for p in pieces) == 5:
            await servers[0].__aexit__(None, None, None)

    way = Way(address(servers[0], 1), address(servers[1], 2))
    sampled = await sample(client, way, asked, Sampling(max_tokens=300), timeout=60, emit=emit)
    assert sampled.completion.text == TEXT
    assert [token for piece in pieces for token in piece.token_ids] == sampled.completion.token_ids
    assert sampled.spans[0].version == 1 and sampled.spans[-1].version == 2
    check_logprobs(sampled, asked)


async def test_a_cut_call_is_made_again_and_keeps_what_was_streamed(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0])
    way = Way(address(servers[0], 1), address(servers[0], 2))
    given = 0

    async def emit(piece: Piece, server: ServerAddress) -> None:
        nonlocal given
        given += len(piece.token_ids)
        if given == 7:  # in the middle of a character
            way.cut.set()

    sampled = await sample(client, way, asked, Sampling(max_tokens=300), timeout=60, emit=emit)
    assert way.calls == 2
    assert sampled.spans[0] >= VersionSpan(1, 7)
    assert sampled.completion.text == await client.detokenize(address(servers[0]), sampled.completion.token_ids[:-1])
    check_logprobs(sampled, asked)


async def test_a_cut_call_that_was_not_streamed_begins_anew(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0])
    way = Way(address(servers[0], 1), address(servers[0], 2))
    sampling = asyncio.create_task(sample(client, way, asked, Sampling(max_tokens=300), timeout=60))
    await until(lambda: servers[0].running)
    way.cut.set()
    sampled = await sampling
    assert (sampled.completion.text, [span.version for span in sampled.spans]) == (TEXT, [2])


async def test_the_time_in_which_servers_take_no_calls_does_not_count(
    client: ModelClient, servers: list[ScriptedServer]
) -> None:
    asked = await prompt(client, servers[0], "[[reply:yes]]")
    way = Way(address(servers[0]))
    way.before = lambda: asyncio.sleep(1.5)
    sampled = await sample(client, way, asked, Sampling(max_tokens=30), timeout=1)
    assert sampled.completion.text == "yes"


async def test_the_time_of_all_calls_counts(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0], "[[delay:30]]")
    with pytest.raises(ModelError, match="within"):
        await sample(client, Way(address(servers[0])), asked, Sampling(max_tokens=30), timeout=0.3)
    await until(lambda: servers[0].aborted == 1 and not servers[0].running)


async def test_a_failing_server_is_left(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0])
    await servers[0].__aexit__(None, None, None)
    sampled = await sample(client, Way(address(servers[0]), address(servers[1])), asked, Sampling(max_tokens=300), timeout=60)
    assert sampled.server.url == servers[1].url


async def test_a_server_that_aborts_everything_is_given_up(client: ModelClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.llm.sampler.ABORT_PAUSE", 0.0)
    async with ScriptedServer(delay=30) as server:
        asked = await prompt(client, server)
        sampling = asyncio.create_task(sample(client, Way(address(server)), asked, Sampling(), timeout=60))
        while not sampling.done():
            await post(server, "/abort_requests")
        with pytest.raises(ModelError, match="aborts every generation"):
            await sampling


async def test_a_reply_that_goes_on_may_not_be_longer(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0], "[[reply:word word word word word]][[abort]]")
    sampled = await sample(client, Way(address(servers[0])), asked, Sampling(max_tokens=12), timeout=60)
    assert (len(sampled.completion.token_ids), sampled.completion.finish_reason) == (12, "length")


async def test_a_stop_string_across_two_parts_ends_the_reply(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0], "[[reply:one two three four five six seven]]")
    way = Way(address(servers[0]), address(servers[1]))
    text = ""

    async def emit(piece: Piece, server: ServerAddress) -> None:
        nonlocal text
        text += piece.text
        if "th" in text:
            way.cut.set()

    sampled = await sample(client, way, asked, Sampling(max_tokens=60, stop=("three four",)), timeout=60, emit=emit)
    assert (sampled.completion.text, sampled.completion.finish_reason) == ("one two three four", "stop")
    decoded = await client.detokenize(address(servers[0]), sampled.completion.token_ids)
    assert decoded.startswith("one two three four") and "five" not in decoded
    assert sum(span.tokens for span in sampled.spans) == len(sampled.completion.token_ids)
    check_logprobs(sampled, asked)


async def test_the_server_says_which_weights_it_had(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0])
    await post(servers[0], "/update_weight_version", {"new_version": "7"})
    way = Way(address(servers[0], 3, Feature.GENERATE))
    sampling = asyncio.create_task(sample(client, way, asked, Sampling(max_tokens=300), timeout=60))
    await until(lambda: servers[0].running)
    await asyncio.sleep(0.1)
    await post(servers[0], "/update_weight_version", {"new_version": "8"})
    sampled = await sampling
    assert sampled.completion.text == TEXT
    assert [span.version for span in sampled.spans] == [7, 8]
    check_logprobs(sampled, asked)


async def test_a_server_that_forgot_its_version_was_restarted(client: ModelClient, servers: list[ScriptedServer]) -> None:
    """Which weights it has now is not known, so that nothing it samples is taken."""
    asked = await prompt(client, servers[0], "[[reply:yes]]")
    await post(servers[1], "/update_weight_version", {"new_version": "3"})
    features = (Feature.GENERATE, Feature.WEIGHT_VERSION)
    way = Way(address(servers[0], 3, *features), address(servers[1], 3, *features))
    sampled = await sample(client, way, asked, Sampling(), timeout=60)
    assert sampled.server.url == servers[1].url


async def test_a_label_that_is_no_number_leaves_the_known_version(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0], "[[reply:yes]]")
    way = Way(address(servers[0], 3, Feature.GENERATE))
    sampled = await sample(client, way, asked, Sampling(), timeout=60)
    assert [span.version for span in sampled.spans] == [3]


@pytest.mark.parametrize("features", [(), (Feature.GENERATE,)])
async def test_streams_are_the_same_reply(
    client: ModelClient, servers: list[ScriptedServer], features: tuple[Feature, ...]
) -> None:
    asked = await prompt(client, servers[0])
    await post(servers[0], "/update_weight_version", {"new_version": "4"})
    pieces: list[Piece] = []

    async def emit(piece: Piece, server: ServerAddress) -> None:
        pieces.append(piece)

    route = FixedRoute(address(servers[0], 1, *features))
    sampled = await sample(client, route, asked, Sampling(max_tokens=300, seed=1), timeout=60, emit=emit)
    whole = await sample(client, route, asked, Sampling(max_tokens=300, seed=1), timeout=60)
    assert len(pieces) > 10
    assert "".join(piece.text for piece in pieces) == sampled.completion.text == whole.completion.text
    assert sampled.completion.token_ids == whole.completion.token_ids
    assert sampled.completion.logprobs == whole.completion.logprobs
    version = 4 if features else 1  # the server's own word, where it gives one
    assert [span.version for span in sampled.spans] == [span.version for span in whole.spans] == [version]


async def test_one_version_or_none(client: ModelClient, servers: list[ScriptedServer]) -> None:
    asked = await prompt(client, servers[0], "[[reply:yes]]")
    way = Way(address(servers[0], 1), address(servers[0], 2))
    route = OneVersionRoute(way, 1)
    assert (await sample(client, route, asked, Sampling(), timeout=60)).spans[0].version == 1
    with pytest.raises(Overtaken, match="began on version 1"):
        await sample(client, route, asked, Sampling(), timeout=60)


async def test_new_weights_that_nobody_has_noted_yet_are_not_the_one_version(
    client: ModelClient, servers: list[ScriptedServer]
) -> None:
    asked = await prompt(client, servers[0])
    known = address(servers[0], 1, Feature.GENERATE)
    await post(servers[0], "/update_weight_version", {"new_version": "2"})
    assert (await sample(client, FixedRoute(known), asked, Sampling(), timeout=60)).spans[0].version == 2
    with pytest.raises(Overtaken, match="began on version 1"):
        await sample(client, OneVersionRoute(FixedRoute(known), 1), asked, Sampling(), timeout=60)
